"""The package's version; the protocol has one of its own, in `codec`."""

VERSION = "0.1.0"
