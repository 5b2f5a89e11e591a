"""A core process that follows a script instead of running a model: for failures no healthy core shows.

Started like `dataplane.core_process`. The options say what it does:
- mode: "serve" (default), "config" (refuses its configuration), "crash" (exits while loading), "fault" (reports a
  fault at the first request), "stale" (marks all but the last frame with another epoch), "deaf" (ignores Shutdown
  and SIGTERM)
- emit: how many tokens for each request, one frame each, or the ids themselves
- finish: whether the last one ends the request (default), or it hangs
- loading_s: how long it takes to become READY
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time

from dataplane.core_link import CoreEndpoint
from dataplane.core_process import die_with_parent
from dataplane.protocol import (
    AbortRequests,
    AddRequest,
    CoreFault,
    CoreReady,
    CoreStats,
    Counters,
    FinishReason,
    Gauges,
    RequestOutput,
    Shutdown,
    StepOutput,
    Timing,
)

LETTER_A = 49
"""The id of "A" in SmolLM2's vocabulary."""


class Script:
    def __init__(self, link: CoreEndpoint, epoch: int, options: dict[str, object]) -> None:
        self.link = link
        self.mode = str(options.get("mode", "serve"))
        emit = options.get("emit", 3)
        self.emit: list[int] = emit if isinstance(emit, list) else [LETTER_A] * int(str(emit))
        self.finish = bool(options.get("finish", True))
        self.epoch = self.own_epoch = epoch
        self.counters = Counters()
        self.step = 0
        self.running: set[str] = set()

    def send(self, request_id: str, tokens: list[int], finish: FinishReason | None) -> None:
        self.step += 1
        if finish is not None:
            self.running.discard(request_id)
        self.counters.scheduling.steps += 1
        self.counters.scheduling.output_tokens += len(tokens)
        now = time.monotonic()
        output = RequestOutput(
            request_id=request_id,
            token_ids=tokens,
            finish=finish,
            cached_tokens=2,
            timing=Timing(queued=now, scheduled=now, first_token=now, last_token=now),
        )
        stats = CoreStats(counters=self.counters, gauges=Gauges(running=len(self.running), blocks_total=8))
        self.link.send(StepOutput(boot_epoch=self.epoch, step=self.step, outputs=[output], stats=stats))

    def add(self, request_id: str) -> None:
        if self.mode == "fault":
            self.link.send(CoreFault(boot_epoch=self.epoch, error="the script says so"))
            sys.exit(1)
        self.running.add(request_id)
        for number, token in enumerate(self.emit):
            last = self.finish and number == len(self.emit) - 1
            self.epoch = self.own_epoch + (100 if self.mode == "stale" and not last else 0)
            self.send(request_id, [token], FinishReason.LENGTH if last else None)

    def run(self) -> None:
        while True:
            self.link.wait()
            for message in self.link.drain():
                if isinstance(message, AddRequest):
                    self.add(message.request.request_id)
                elif isinstance(message, AbortRequests):
                    for request_id in message.request_ids:
                        self.send(request_id, [], FinishReason.ABORT)
                elif isinstance(message, Shutdown) and self.mode != "deaf":
                    return


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--check-when-idle", action="store_true")
    arguments = parser.parse_args()
    options = json.loads(arguments.options)
    die_with_parent(arguments.parent)
    mode = options.get("mode")
    if mode == "crash":
        return 7
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(float(options.get("loading_s", 0)))
    with CoreEndpoint(arguments.address, arguments.epoch) as link:
        if mode == "config":
            link.send(CoreFault(boot_epoch=arguments.epoch, error="there is no model at /nowhere"))
            return 2
        ready = CoreReady(
            boot_epoch=arguments.epoch,
            model="script",
            max_model_len=256,
            block_size=16,
            total_blocks=8,
            load_seconds=0.1,
        )
        link.send(ready)
        Script(link, arguments.epoch, options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
