"""Configurations that ship with the package, imported as ``lit_encoders.cli_configs``."""
