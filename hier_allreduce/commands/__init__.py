"""One module for each ``hier-allreduce`` command: ``add_arguments(parser)`` and ``main(args) -> exit status``."""
