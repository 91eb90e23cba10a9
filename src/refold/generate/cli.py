"""The ``generate`` command, and what ``doctor`` says of JAX: plain functions that the command line registers."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from refold.errors import ArgumentError, CheckpointError, MissingDependency, RefoldError
from refold.generate.sampling import Sampling


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or owner/name on the Hugging Face hub.")],
    prompt: Annotated[str | None, typer.Option(help="Text to go on with.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="Prompt as token ids, separated by commas or spaces.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    backend: Annotated[str, typer.Option(help="What computes: jax.")] = "jax",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that sum to this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 0,
    stop: Annotated[list[int] | None, typer.Option(help="Token id that ends the text; repeatable.")] = None,
    every: Annotated[int, typer.Option(help="Steps on the device between outputs.")] = 8,
) -> None:
    """Generate text from a checkpoint; it appears as it is made.

    Raises:
        typer.Exit: with code 2 after a message on standard error, where an argument or the checkpoint is at fault.
    """
    try:
        for piece in generate_text(
            model, prompt=prompt, token_ids=token_ids, max_new_tokens=max_new_tokens, backend=backend, dtype=dtype,
            sampling=Sampling(temperature, top_k, top_p, seed), stop_tokens=stop, every=every,
        ):  # fmt: skip
            sys.stdout.write(piece)
            sys.stdout.flush()
    except RefoldError as error:
        sys.stderr.write(f"refold generate: {error}\n")
        raise typer.Exit(2) from None
    sys.stdout.write("\n")


def generate_text(
    model: str,
    *,
    prompt: str | None = None,
    token_ids: str | None = None,
    max_new_tokens: int = 64,
    backend: str = "jax",
    dtype: str | None = None,
    sampling: Sampling | None = None,
    stop_tokens: list[int] | None = None,
    every: int = 8,
) -> Iterator[str]:
    """Yield the text after a prompt piece by piece; token ids with spaces where ``token_ids`` were given.

    Raises:
        ArgumentError: not exactly one of ``prompt`` and ``token_ids`` is given, or one of them cannot be used.
        CheckpointError: the checkpoint cannot be read, or has no tokenizer for a text prompt.
        MissingDependency: an optional package is needed and not installed.
    """
    if (prompt is None) == (token_ids is None):
        raise ArgumentError("give either --prompt or --token-ids.")
    if backend != "jax":
        raise ArgumentError(f"backend must be jax; it is {backend!r}.")
    try:
        from refold.generate.jax import NO_TOKEN, Generator
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "jax":
            raise
        raise MissingDependency("backend jax needs JAX (pip install refold[jax]).") from error
    from refold.models.checkpoint import find_checkpoint

    directory = find_checkpoint(model)
    if prompt is not None:
        encode, decode = _tokenizer(directory)
        ids = encode(prompt)
        if not ids:
            raise ArgumentError("--prompt holds no token; give some text.")
    else:
        ids, decode = _parse_ids(token_ids or ""), None
    generator = Generator.from_checkpoint(directory, dtype=dtype)
    stop = set(generator.config.stop_tokens if stop_tokens is None else stop_tokens)
    made: list[int] = []
    shown = ""
    conversation = generator.read([ids])
    stream = generator.stream(conversation, max_new_tokens, sampling=sampling, stop_tokens=sorted(stop), every=every)
    for part in stream:
        new = [int(token) for token in part[0] if token != NO_TOKEN]
        if decode is None:
            yield "".join(f"{token} " for token in new)
            continue
        made += [token for token in new if token not in stop]
        text = decode(made)
        if text.startswith(shown) and not text.endswith("\ufffd"):  # wait for the rest of a split character
            yield text[len(shown) :]
            shown = text
    if decode is not None:
        yield decode(made)[len(shown) :]


def _tokenizer(directory: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Return the encoder and decoder of a checkpoint's ``tokenizer.json``."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{directory} has no tokenizer.json; give the prompt as --token-ids.")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependency(f"{path} needs the package tokenizers (pip install refold[hf]).") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a file it cannot parse
        raise CheckpointError(f"{path} is not a tokenizer ({error}).") from error
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ArgumentError(f"--token-ids must be integers separated by commas or spaces; got {text!r}.") from error


def jax_devices() -> dict[str, Any]:
    """Describe JAX for ``refold doctor``: version and devices, or why there are none."""
    try:
        import jax
    except ImportError:
        return {"version": None, "devices": [], "reason": "jax is not installed (pip install refold[jax])"}
    devices = [{"platform": d.platform, "kind": d.device_kind, "id": d.id} for d in jax.devices()]
    return {"version": jax.__version__, "devices": devices, "reason": None}
