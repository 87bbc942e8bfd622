"""The version: setuptools, the native module and ``orthokern.__version__`` all read it here."""

__version__ = "0.1.0"
