"""llama.cpp: its own server, built for this machine from the sources that the package llama-cpp-python carries.

Layer: service. The package's Python server answers one request at a time; llama.cpp's own batches, so that is what a
user with several requests runs, and what is measured. Weights are the checkpoint's GGUF file as it is, or made from it
by llama.cpp's own quantiser.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dataplane.bench.engine.client import Endpoint
from dataplane.bench.engine.peers.setting import HOST, Setting
from dataplane.bench.engine.server import Launch
from dataplane.bench.environment import run
from dataplane.bench.errors import NotToBeHadError

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
NAME = "llama.cpp"
FORMATS: Mapping[str, str] = MappingProxyType(
    {"shipped": "", "f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
)
"""The checkpoint's own, and llama.cpp's names of those it can be turned into."""
DEFAULT = "q4_0"
"""What llama.cpp's CPU kernels repack into their fastest layout."""
BUILD = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    *(f"-DLLAMA_{name}=OFF" for name in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI")),
    "-DLLAMA_OPENSSL=OFF",
)
PROGRAMS = ("llama-server", "llama-quantize")


def prepare(setting: Setting) -> Launch:
    """Raises NotToBeHadError."""
    if setting.model.suffix != ".gguf":
        raise NotToBeHadError(f"{NAME} reads GGUF files, and {setting.model.name} is none")
    programs = _programs(setting)
    kind = setting.format or DEFAULT
    model = _weights(setting, programs, kind)
    port, url = setting.address()
    context = setting.seats * setting.longest
    command = [str(programs / "llama-server"), "--model", str(model), "--host", HOST, "--port", str(port)]
    command += ["--parallel", str(setting.seats), "--ctx-size", str(context), "--threads", str(setting.threads)]
    command += ["--threads-batch", str(setting.threads), "--cache-ram", "0", "--no-webui"]
    return Launch(
        endpoint=Endpoint(
            NAME, url, "bench", extra={"ignore_eos": True, "stream_options": {"include_usage": True}, "seed": 0}
        ),
        command=tuple(command),
        version=f"{PACKAGE} {VERSION}",
        setup={
            "dtype": f"weights {kind}, KV float16",
            "server": f"llama-server with {setting.seats} slots, continuous batching",
            "build": "Release, for this CPU",
        },
    )


def _programs(setting: Setting) -> Path:
    """The folder with the built programs."""
    environments = setting.environments
    home, wanted = environments.folder / NAME, [PACKAGE, VERSION, *BUILD]
    programs = home / "build" / "bin"
    if environments.has(NAME, wanted):
        return programs
    shutil.rmtree(home, ignore_errors=True)
    python = environments.python(f"{NAME}-build", ["cmake>=3.28", "ninja"])
    tools = python.parent
    environments.tell(f"building {NAME} from the sources of {PACKAGE} {VERSION} (minutes)")
    fetch = [str(python), "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    fetch += ["--no-binary", PACKAGE, "--dest", str(home), f"{PACKAGE}=={VERSION}"]
    run(fetch, f"fetch the sources of {PACKAGE}")
    source = _unpacked(home)
    make = [str(tools / "cmake"), "-S", str(source), "-B", str(home / "build"), "-G", "Ninja", *BUILD]
    run([*make, f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"], f"configure {NAME}")
    build = [str(tools / "cmake"), "--build", str(home / "build"), "--parallel", str(setting.threads)]
    run([*build, "--target", *PROGRAMS], f"build {NAME}")
    environments.finished(NAME, wanted)
    return programs


def _unpacked(home: Path) -> Path:
    """llama.cpp's sources. Raises NotToBeHadError."""
    archives = sorted(home.glob("*.tar.gz"))
    if not archives:
        raise NotToBeHadError(f"the registry gave no sources of {PACKAGE}")
    try:
        with tarfile.open(archives[0]) as archive:
            archive.extractall(home, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise NotToBeHadError(f"cannot unpack {archives[0].name}: {error}") from None
    found = next(iter(home.glob("*/vendor/llama.cpp")), None)
    if found is None:
        raise NotToBeHadError(f"the sources of {PACKAGE} hold no llama.cpp")
    return found


def _weights(setting: Setting, programs: Path, kind: str) -> Path:
    """A GGUF file of the format `kind`; the quantiser starts from float32, so that nothing is rounded twice more."""
    if kind not in FORMATS:
        raise NotToBeHadError(f"{NAME} is offered in {', '.join(FORMATS)}, not in {kind}")
    if kind == "shipped":
        return setting.model
    whole = setting.folder / f"{setting.model.stem}-f32.gguf"
    quantize = str(programs / "llama-quantize")
    if not whole.exists():
        run([quantize, "--allow-requantize", str(setting.model), str(whole), "F32"], "write the weights in float32")
    if kind == "f32":
        return whole
    target = setting.folder / f"{setting.model.stem}-{kind}.gguf"
    if not target.exists():
        run([quantize, str(whole), str(target), FORMATS[kind]], f"write the weights in {kind}")
    return target
