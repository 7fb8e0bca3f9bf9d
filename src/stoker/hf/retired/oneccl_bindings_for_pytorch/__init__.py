"""Imported by processes that a script starts, which inherit sys.path and not the import hooks (see stoker/hf/imports.py)."""

from stoker.hf.imports import replace

replace(__name__)
