"""A core process that follows a script instead of running a model: for failures no healthy core shows.

Started like `dataplane.core_process`. The options say what it does:
- mode: "serve" (default), "config" (refuses its configuration), "crash" (exits while loading), "fault" (reports a
  fault at the first request), "stale" (marks all but the last frame with another epoch), "deaf" (ignores Shutdown
  and SIGTERM), "hang" (gets stuck for good once it has answered a request, and ignores SIGTERM), "garbled" (answers a
  request with a frame that nobody can read, and goes on)
- exits: whether a core that has reported a fault ends (default), or stays
- waits: whether a core says nothing until SIGCONT before it reports a fault
- emit: how many tokens for each request, one frame each, or the ids themselves
- finish: whether the last one ends the request (default), or it hangs; or how it ends: "stop" by the last one's id
- emits: by the number of the sample, what it emits instead; where log-probabilities are asked for, the k-th token of
  sample s has −(s + 1)·(k + 1)/8, and the token after it in the vocabulary beside it
- most: the most sequences that the core says it runs at once
- refusal: message, code and parameter with which a request ends: at once without tokens, else when the next comes
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
    EngineRequest,
    FinishReason,
    Gauges,
    RequestOutput,
    Shutdown,
    StepOutput,
    Timing,
    TokenLogprob,
)

LETTER_A = 49
"""The id of "A" in SmolLM2's vocabulary."""


class Script:
    def __init__(self, link: CoreEndpoint, epoch: int, options: dict[str, object], beat_s: float) -> None:
        self.link = link
        self.beat_s = beat_s
        self.mode = str(options.get("mode", "serve"))
        emit = options.get("emit", 3)
        self.emit: list[int] = emit if isinstance(emit, list) else [LETTER_A] * int(str(emit))
        self.emits: dict[str, list[int]] = dict(options.get("emits", {}))  # type: ignore[call-overload]
        self.refusal: list[str] = list(options.get("refusal", []))  # type: ignore[call-overload]
        self.finish = options.get("finish", not self.refusal)
        self.exits, self.waits = bool(options.get("exits", True)), bool(options.get("waits", False))
        self.epoch = self.own_epoch = epoch
        self.counters = Counters()
        self.step = 0
        self.running: set[str] = set()

    def send(
        self, request_id: str, tokens: list[int], finish: FinishReason | None, **more: list[TokenLogprob] | str | None
    ) -> None:
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
            **more,  # type: ignore[arg-type]
        )
        stats = CoreStats(counters=self.counters, gauges=Gauges(running=len(self.running), blocks_total=8))
        self.link.send(StepOutput(boot_epoch=self.epoch, step=self.step, outputs=[output], stats=stats))

    def add(self, request: EngineRequest) -> None:
        if self.mode == "fault":
            if self.waits:
                signal.sigwait({signal.SIGCONT})
            self.link.send(CoreFault(boot_epoch=self.epoch, error="the script says so"))
            stay(not self.exits)
            sys.exit(1)
        if self.mode == "garbled":
            self.link.send(Shutdown(boot_epoch=self.epoch))  # type: ignore[arg-type]
            return
        if self.refusal:
            self.refuse()
        samples = [request.request_id, *request.forks]
        self.running.update(samples)
        scripts = [self.emits.get(str(number), self.emit) for number in range(len(samples))]
        for step in range(max(len(script) for script in scripts)):
            for number, (request_id, script) in enumerate(zip(samples, scripts, strict=True)):
                if step < len(script):
                    self.emit_one(request, request_id, number, step, script)
        if self.refusal and not any(scripts):
            self.refuse()
        stay(self.mode == "hang")

    def refuse(self) -> None:
        error, code, param = self.refusal
        for request_id in list(self.running):
            self.send(request_id, [], FinishReason.ERROR, error=error, error_code=code, error_param=param)

    def emit_one(self, request: EngineRequest, request_id: str, number: int, step: int, script: list[int]) -> None:
        last = bool(self.finish) and step == len(script) - 1
        end = FinishReason.STOP if self.finish == "stop" else FinishReason.LENGTH
        self.epoch = self.own_epoch + (100 if self.mode == "stale" and not last else 0)
        more: dict[str, object] = {}
        if request.params.logprobs is not None:
            more["logprobs"] = [logprob_of(script[step], -(number + 1) * (step + 1) / 8, request.params.logprobs)]
        if request.params.prompt_logprobs is not None and number == step == 0:
            after = request.prompt_token_ids[1:]
            entries = [logprob_of(token, -1.0, request.params.prompt_logprobs) for token in after]
            more["prompt_logprobs"] = [None, *entries]
        self.send(request_id, [script[step]], end if last else None, **more)  # type: ignore[arg-type]

    def run(self) -> None:
        while True:
            self.link.wait(self.beat_s)
            self.link.send(StepOutput(boot_epoch=self.own_epoch, step=self.step))
            for message in self.link.drain():
                if isinstance(message, AddRequest):
                    self.add(message.request)
                elif isinstance(message, AbortRequests):
                    for request_id in message.request_ids:
                        self.send(request_id, [], FinishReason.ABORT)
                elif isinstance(message, Shutdown) and self.mode != "deaf":
                    return


def stay(for_good: bool) -> None:
    while for_good:
        time.sleep(60)


def logprob_of(token: int, logprob: float, top: int) -> TokenLogprob:
    beside = [(token, logprob), (token + 1, logprob - 1.0)][:top]
    return TokenLogprob(token_id=token, logprob=logprob, rank=1, top=beside)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--check-when-idle", action="store_true")
    parser.add_argument("--beat", type=float, required=True)
    arguments = parser.parse_args()
    options = json.loads(arguments.options)
    die_with_parent(arguments.parent)
    mode = options.get("mode")
    if mode == "crash":
        return 7
    if mode in ("deaf", "hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.get("waits"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
    time.sleep(float(options.get("loading_s", 0)))
    with CoreEndpoint(arguments.address, arguments.epoch) as link:
        if mode == "config":
            link.send(CoreFault(boot_epoch=arguments.epoch, error="there is no model at /nowhere"))
            stay(not options.get("exits", True))
            return 2
        ready = CoreReady(
            boot_epoch=arguments.epoch,
            model="script",
            max_model_len=256,
            block_size=16,
            total_blocks=16,
            load_seconds=0.1,
            max_num_seqs=int(options.get("most", 0)),
        )
        link.send(ready)
        Script(link, arguments.epoch, options, arguments.beat).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
