"""alltokens doctor: what this machine has, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from typing import NamedTuple

import torch

from alltokens.cli._options import Switch, asks_for_help, read, show_help
from alltokens.engine.progress import table
from alltokens.version import __version__

PROGRAM = "alltokens doctor"
PACKAGES = ("torch", "torchvision", "timm", "accelerate", "numpy", "pillow", "tyro", "rich")


@dataclass(frozen=True)
class Command:
    json: Switch = False
    """Print JSON instead of a table."""


class Finding(NamedTuple):
    what: str
    ok: bool
    value: str
    advice: str = ""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "Versions, devices, fused attention, compilers and extras of this machine.")
        return 0
    command = read(Command(), words, PROGRAM)
    findings = examine()
    if command.json:
        print(json.dumps({item.what: item._asdict() for item in findings}, indent=2))
        return 0
    rows = [("ok" if item.ok else "missing", item.what, item.value, item.advice) for item in findings]
    table(("", "", "", ""), rows)
    return 0


def examine() -> list[Finding]:
    return [*_versions(), *_devices(), *_speed(), *_extras()]


def _versions() -> list[Finding]:
    found = [Finding("alltokens", True, __version__), Finding("python", True, platform.python_version())]
    for name in PACKAGES:
        version = _version(name)
        found.append(
            Finding(name, version is not None, version or "not installed", "" if version else f"pip install {name}")
        )
    return found


def _devices() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [Finding("cpu", True, f"{cores} usable cores, {torch.get_num_threads()} threads per operation")]
    memory = _memory()
    if memory is not None:
        found.append(Finding("memory", True, f"{memory / 2**30:.1f} GiB"))
    cuda = torch.version.cuda
    driver = _driver()
    if not torch.cuda.is_available():
        advice = (
            f"torch is built for CUDA {cuda}; the driver is {driver or 'not there'}"
            if cuda
            else "torch is built without CUDA"
        )
        return [*found, Finding("cuda", False, "no device", advice)]
    found.append(Finding("cuda", True, f"{cuda}, driver {driver or 'unknown'}"))
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if card.major >= 8 else "no bf16"
        found.append(Finding(f"cuda:{index}", True, f"{card.name}, {card.total_memory / 2**30:.1f} GiB, {bf16}"))
    return found


def _speed() -> list[Finding]:
    from timm.layers.config import use_fused_attn

    fused = bool(use_fused_attn())
    compiler = next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)
    triton = _version("triton")
    cuda = torch.cuda.is_available()
    return [
        Finding("fused attention", fused, "on" if fused else "off", "" if fused else "unset TIMM_FUSED_ATTN"),
        Finding(
            "triton",
            triton is not None,
            triton or "not installed",
            "" if triton else "train.compile on a GPU needs it" if cuda else "only used on a GPU",
        ),
        Finding(
            "C++ compiler",
            compiler is not None,
            shutil.which(compiler) or compiler if compiler else "not found",
            "" if compiler else "train.compile on a CPU needs one: install g++ or clang",
        ),
    ]


def _extras() -> list[Finding]:
    """The optional packages, as the installed package itself names them."""
    found: list[Finding] = []
    for requirement in metadata.requires("alltokens") or []:
        match = re.match(r"([\w.-]+).*extra\s*==\s*['\"](\w+)['\"]", requirement)
        if match is None or match[2] == "dev":
            continue
        name, extra = match[1], match[2]
        version = _version(name)
        advice = "" if version else f"pip install 'alltokens[{extra}]'"
        found.append(Finding(f"extra {extra}", version is not None, f"{name} {version or 'not installed'}", advice))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # Some builds carry a package under another distribution's name (pytorch-triton).
        return "installed" if util.find_spec(name) is not None else None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return None


def _driver() -> str | None:
    """The NVIDIA driver's version, as its own tool says it."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
