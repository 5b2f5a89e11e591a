"""`python -m controlplane` is `tidegate`: how the supervisor starts its children. Layer: service."""

from controlplane.cli import main

if __name__ == "__main__":
    main(prog_name="tidegate")
