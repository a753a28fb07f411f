"""The trace of a stage, and the passes over it, up to source code.

In order: signature, guards, trace, functionalize, cse, partition (with rematerialise), copies (with layouts), codegen.
"""
