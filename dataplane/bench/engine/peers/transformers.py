"""transformers: `transformers serve` with continuous batching.

Layer: service. It takes texts, which are made so that it cuts them into the same ids, and has no `ignore_eos`, so the
checkpoint it is given knows no end of sequence. Weights are float32 safetensors made from the engine's own reading.
"""

from __future__ import annotations

from dataplane.bench.engine.client import Endpoint
from dataplane.bench.engine.export import hugging_face_folder
from dataplane.bench.engine.peers.setting import HOST, Setting
from dataplane.bench.engine.server import Launch
from dataplane.bench.environment import version_of

NAME = "transformers"
REQUIREMENTS = ("transformers[serving]==5.24.0", "torch==2.13.0")
BLOCK = 32


def prepare(setting: Setting) -> Launch:
    """Raises NotToBeHadError."""
    python = setting.environments.python(NAME, REQUIREMENTS)
    model = hugging_face_folder(setting.model, setting.folder / "hugging-face")
    port, url = setting.address()
    blocks = setting.seats * -(-setting.longest // BLOCK)
    command = [str(python.parent / "transformers"), "serve", str(model), "--host", HOST, "--port", str(port)]
    command += ["--dtype", "float32", "--device", "cpu", "--continuous-batching", "--cb-block-size", str(BLOCK)]
    command += ["--cb-num-blocks", str(blocks), "--log-level", "error"]
    threads, caches = str(setting.threads), str(setting.environments.folder / NAME / "cache")
    return Launch(
        endpoint=Endpoint(NAME, url, str(model), takes_ids=False),
        command=tuple(command),
        version=f"transformers {version_of(python, 'transformers')}, torch {version_of(python, 'torch')}",
        setup={"dtype": "float32, weights and KV too", "server": "`transformers serve` with continuous batching"},
        environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "HF_HOME": caches},
    )
