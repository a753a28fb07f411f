"""The trace of a stage, and the passes from the trace to source code.

In order: signature, guards, trace, functionalize, cse, partition (with rematerialise), copies (with layouts), codegen
(with bindings). Shared: nodes, aliasing, block, locations.
"""
