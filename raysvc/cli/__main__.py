"""`python -m raysvc.cli`."""

from raysvc.cli.main import main

main()
