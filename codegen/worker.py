"""Compiles rendered kernels in a process of its own.

:mod:`.compile` runs this file as a script, with ``CUTE_DSL_ARCH`` set, and exchanges one line of JSON a kernel with
it: requests by standard input, replies by the pipe whose number is its argument.
It imports nothing of this package, so that neither torch nor CUDA comes into the process.

Request: ``source`` and ``output`` (folder), ``name`` (of the exported function), ``options``, ``timeout`` (seconds).
 Reply: ``seconds``; or ``error``, and ``line``, where in the source it arose, or None.  In the output folder appear
``kernel.o``, ``kernel.ptx``, ``kernel.mlir`` (the lowered module) and ``compile.log``.
"""

import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from types import ModuleType
from typing import Any

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def load(path: str, name: str) -> ModuleType:
    """Import a rendered kernel from its file."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the DSL looks the source of decorated functions up there
    spec.loader.exec_module(module)
    return module


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel and write its files."""
    import cutlass.cute as cute

    started = time.perf_counter()
    output = request["output"]
    module = load(request["source"], request["name"])
    with tempfile.TemporaryDirectory(dir=output, prefix="dump-") as dump:
        # Relative to the working directory: options are split at spaces.
        options = f"{request['options']} --dump-dir {os.path.relpath(dump)}"
        compiled = cute.compile(module.launch, *module.fake_arguments(), options=options)
        if not isinstance(compiled.__ptx__, str):
            raise RuntimeError("the compiler kept no PTX")
        with open(os.path.join(output, "kernel.ptx"), "w") as file:
            file.write(compiled.__ptx__)
        with open(os.path.join(output, "kernel.mlir"), "w") as file:
            file.write(str(compiled.ir_module))
        compiled.export_to_c(
            os.path.join(output, "kernel.o"), function_name=request["name"], export_only_tvm_ffi_symbols=True
        )
    return {"seconds": time.perf_counter() - started}


def describe(error: BaseException, source: str) -> dict[str, Any]:
    """Turn an exception into a reply: its message, and the line of the kernel that it comes from."""
    chain: BaseException | None = error
    message = _ESCAPE.sub("", f"{type(error).__name__}: {error}").strip()
    line = None
    while chain is not None and line is None:
        frames = traceback.extract_tb(chain.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == source), None)
        if line is None and isinstance(chain, SyntaxError) and chain.filename == source:
            line = chain.lineno
        chain = chain.__cause__ or chain.__context__
    if line is None:  # diagnostics of the DSL and of its assembler name the place in their text
        place = re.search(re.escape(source) + r":(\d+)", message)
        line = int(place[1]) if place else None
    return {"error": message, "line": line}


def serve() -> None:
    """Answer requests on standard input until it ends."""
    replies = os.fdopen(int(sys.argv[1]), "w")
    sys.dont_write_bytecode = True
    sys.modules["torch"] = None  # type: ignore[assignment]  # TVM-FFI would import it, for a second, to no use here
    for text in sys.stdin:
        request = json.loads(text)
        os.chdir(request["output"])
        log = os.open(os.path.join(request["output"], "compile.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        signal.alarm(request["timeout"])
        try:
            reply = compile_request(request)
        except Exception as error:
            reply = describe(error, request["source"])
        signal.alarm(0)
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
