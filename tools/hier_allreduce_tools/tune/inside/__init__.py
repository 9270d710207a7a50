"""The folder that ``tune`` adds to a program's PYTHONPATH: Python runs its module first."""
