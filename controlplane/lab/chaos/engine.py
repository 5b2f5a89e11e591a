"""A fake engine that can be killed: `python -m controlplane.lab.chaos.engine`.

Layer: service. The gateway bench's engine, with every usage record written to a file before it is reported, so that a
killed engine tells them all again when it is back. The file is the engine's own count, which the ledger is compared
with; nothing else writes it. Streams whose client left are recorded with the tokens they were sent.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec
import uvloop

from controlplane.lab.bench.engine import HOST, Engine, serve
from controlplane.lab.bench.engine_report import EngineReporter, Identity, UsageBook
from controlplane.lab.bench.wire import Answers
from dataplane.protocol import UsageRecord

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageRecord).decode


class RecordedBook(UsageBook):
    """Usage records that outlive the process. One process owns the file."""

    def __init__(self, who: Identity, path: Path) -> None:
        super().__init__(who)
        for record in read_records(path):
            super().keep(record)
        if path.exists():  # a line that a kill cut short
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def keep(self, record: UsageRecord) -> None:
        os.write(self._file, _encode(record) + b"\n")
        super().keep(record)


def read_records(path: Path) -> list[UsageRecord]:
    """The whole lines of a record file, none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [_decode(line) for line in lines if line.endswith(b"\n")]


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--replica", required=True)
@click.option("--pool", required=True)
@click.option("--model", required=True)
@click.option("--control-url", required=True)
@click.option("--records", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(*, port: int, replica: str, pool: str, model: str, control_url: str, records: Path) -> None:
    """Serve made-up answers on loopback until SIGTERM; TIDEGATE_INTERNAL_TOKEN opens the control plane."""
    who = Identity(replica=replica, pool=pool, model=model, url=f"http://{HOST}:{port}")
    usage = RecordedBook(who, records)
    reporter = EngineReporter(who, usage, control_url, os.environ["TIDEGATE_INTERNAL_TOKEN"])
    uvloop.run(serve(Engine(Answers(model), usage), port, reporter))


if __name__ == "__main__":
    main()
