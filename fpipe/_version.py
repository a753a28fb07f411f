"""The version, which packaging reads too."""

VERSION = "0.1.0"
