"""A process that compiles grammars to see whether they can be used: what explodes, explodes here.

Layer: service. Reads one grammar a line (JSON) and writes one verdict a line; ends with its parent. It has a memory
limit of its own and is killed by whoever waits too long (`dataplane.grammar_check`).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence

import msgspec

from dataplane.core_process import die_with_parent
from dataplane.decoding.grammar import GrammarCompiler
from dataplane.grammar_check import Verdict
from dataplane.protocol import Grammar
from dataplane.request import RequestError
from dataplane.tokenizer import load_tokenizer

MEMORY_BYTES = 2 * 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dataplane.grammar_worker", description="Try grammars out.")
    parser.add_argument("--model", required=True, help="GGUF file or folder with the tokenizer")
    parser.add_argument("--parent", required=True, type=int, help="process id of the front")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    tokenizer = load_tokenizer(options.model)
    # What is asked again is compiled again: a grammar found ready would seem to take no time.
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, kept=0)
    decode, encode = msgspec.json.Decoder(Grammar).decode, msgspec.json.Encoder().encode
    for line in sys.stdin.buffer:
        started = time.process_time()
        error = ""
        try:
            compiler.compile(decode(line))
        except RequestError as refusal:
            error = refusal.message
        verdict = Verdict(error, time.process_time() - started)
        sys.stdout.buffer.write(encode(verdict) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
