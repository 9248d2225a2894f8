"""The demo's command line, importable without the demo's packages."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["EPOCHS", "parser"]

EPOCHS = 12


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="convgrad demo",
        description="Train a small convolutional network on handwritten digits. A convgrad "
        "server computes every convolution and pooling, forward and backward, over HTTP; then "
        "each of its operations is checked against a float64 reference.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--url", metavar="URL", type=_base, help="use this running server instead of starting one"
    )
    made.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="where to write the picture (default: %(default)s)",
    )
    made.add_argument(
        "--epochs",
        type=_positive,
        default=EPOCHS,
        help="passes over all images (default: %(default)s)",
    )
    return made


def _base(url: str) -> str:
    return url.rstrip("/")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} epochs: expected one or more")
    return number
