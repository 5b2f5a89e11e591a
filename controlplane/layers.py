"""The seven layers of DESIGN §1.2, as the control plane names them. Layer: service."""

from dataplane.protocol import Layer

__all__ = ["Layer"]
