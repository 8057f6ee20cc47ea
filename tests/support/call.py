"""`call.py MODULE FUNCTION`: call a function without arguments of a test file."""

import importlib
import sys

if __name__ == "__main__":
    module, function = sys.argv[1:]
    getattr(importlib.import_module(module), function)()
