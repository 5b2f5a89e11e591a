"""One replica's configuration: frozen, from the command line and the environment.

Layer: service. Holds the two tokens without printing them. Reading the environment is the CLI's business.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.core_client import CoreSpec, RestartPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Everything a replica's front needs to know."""

    replica: str
    """This replica's id, unique in the deployment."""
    pool: str
    """The pool it belongs to."""
    served_model: str
    """The model name clients ask for."""
    model_path: Path
    """Where the tokenizer is read from: a GGUF file or a folder."""
    host: str
    port: int
    advertise_url: str
    """The address gateways reach this replica at."""
    home: Path
    """Folder for the usage journal and the boot epoch."""
    core: CoreSpec
    """How to start the engine core."""
    internal_token: str = field(repr=False)
    """Bearer token of gateways and towards the control plane."""
    control_url: str = ""
    """The control plane's address; empty runs without one: nothing is reported, usage is kept on disk."""
    metrics_token: str = field(default="", repr=False)
    """Bearer token for /metrics; empty means the internal token is asked for."""
    metrics_open: bool = False
    """Serve /metrics to anybody who reaches the port."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    max_body_bytes: int = 4 * 1024 * 1024
    """Larger request bodies are refused with 413."""
    max_sequences: int = 1024
    """Sequences in the engine at once, running or waiting; one more is refused with 503."""
    client_timeout_s: float = 60.0
    """A client that takes nothing for this long is gone; one that has not sent its body by then is refused."""
    report_interval_s: float = 1.0
    drain_s: float = 5.0
    """How long running requests may go on after a request to stop."""

    @property
    def folder(self) -> Path:
        """This replica's own folder."""
        return self.home / "replicas" / self.replica

    def admits(self, authorization: str) -> bool:
        """Whether this Authorization header carries the internal token; in constant time."""
        return _same(authorization, self.internal_token)

    def admits_metrics(self, authorization: str) -> bool:
        """Whether this Authorization header may read /metrics."""
        return self.metrics_open or _same(authorization, self.metrics_token or self.internal_token)


def _same(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    digest = hashlib.sha256(given.strip().encode()).digest()
    return hmac.compare_digest(digest, hashlib.sha256(token.encode()).digest()) and scheme.lower() == "bearer"
