"""The ``generate`` command: a plain function that the command line registers."""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refold.errors import ArgumentError, MissingDependency, RefoldError, printable
from refold.generate.text import Text, check_stop_strings, parse_ids, tokenizer

if TYPE_CHECKING:
    from refold.generate.sampling import Sampling


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or owner/name on the Hugging Face hub.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the prompt; - reads standard input.", show_default=False)
    ] = None,
    token_ids: Annotated[str | None, typer.Option(help="Prompt as token ids, separated by commas or spaces.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    framework: Annotated[str | None, typer.Option(help="torch or jax; torch by default, if it is installed.")] = None,
    device: Annotated[str | None, typer.Option(help="Device for torch; a GPU by default, if there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens that sum to this probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Leave out tokens below this share of the likeliest token's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: avoid tokens that occurred before.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the random choice of tokens.")] = 0,
    stop: Annotated[list[int] | None, typer.Option(help="End a text after this token id; repeatable.")] = None,
    stop_string: Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")] = None,
    every: Annotated[int, typer.Option(help="Tokens that are printed at a time.")] = 8,
) -> None:
    """Generate text from a checkpoint, and print it as it is made.

    Raises:
        typer.Exit: with code 2 after a message on standard error, where an argument or the checkpoint is at fault.
    """
    try:
        if prompt_file is not None:
            if prompt is not None:
                raise ArgumentError("give either --prompt or --prompt-file.")
            prompt = read_prompt(prompt_file)
        from refold.generate.sampling import Sampling

        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        for piece in generate_text(
            model, prompt=prompt, token_ids=token_ids, max_new_tokens=max_new_tokens, framework=framework,
            device=device, dtype=dtype, sampling=sampling, stop_tokens=stop, stop_strings=stop_string or (),
            every=every,
        ):  # fmt: skip
            shown = printable(piece, lines=True) if sys.stdout.isatty() else piece
            sys.stdout.write(_writable(shown, sys.stdout.encoding))
            sys.stdout.flush()
    except RefoldError as error:
        sys.stderr.write(f"refold generate: {printable(str(error), lines=True)}\n")
        raise typer.Exit(2) from None
    sys.stdout.write("\n")


def read_prompt(path: Path) -> str:
    """Return the text of a file, or of standard input if the path is ``-``.

    Raises:
        ArgumentError: it cannot be read as text.
    """
    if str(path) == "-" and sys.stdin is None:
        raise ArgumentError("--prompt-file - reads standard input, which is closed; name a file.")
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"--prompt-file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"--prompt-file {path} is not text in UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _writable(text: str, encoding: str | None) -> str:
    """Return ``text`` with a question mark for each character that the output cannot show."""
    return text.encode(encoding or "utf-8", "replace").decode(encoding or "utf-8")


def generate_text(
    model: str | Path, *, prompt: str | None = None, token_ids: str | None = None, max_new_tokens: int = 64,
    framework: str | None = None, device: str | None = None, dtype: str | None = None,
    sampling: "Sampling | None" = None, stop_tokens: list[int] | None = None, stop_strings: Sequence[str] = (),
    every: int = 8,
) -> Iterator[str]:  # fmt: skip
    """Yield the text after a prompt piece by piece; token ids with spaces where ``token_ids`` were given.

    Raises:
        ArgumentError: not exactly one of ``prompt`` and ``token_ids`` is given, or one of them cannot be used.
        CheckpointError: the checkpoint cannot be read, or has no tokenizer for a text prompt.
        DeviceError: ``device`` is not there.
        MissingDependency: an optional package is needed and not installed.
    """
    if (prompt is None) == (token_ids is None):
        raise ArgumentError("give one of --prompt, --prompt-file and --token-ids.")
    check_stop_strings(stop_strings)
    if stop_strings and prompt is None:
        raise ArgumentError("--stop-string ends a text; with --token-ids, use --stop.")
    from refold.generate.generator import check_positions, check_prompts, check_request
    from refold.models.checkpoint import find_checkpoint
    from refold.models.configs import read_config

    kind, places = _generator(framework, device)
    directory = find_checkpoint(model)
    config = read_config(directory)  # what cannot be done is refused before the weights are read
    if prompt is not None:
        encode, decode = tokenizer(directory)
        ids = encode(prompt)
        if not ids:
            raise ArgumentError("--prompt holds no token; give some text.")
    else:
        ids, decode = parse_ids(token_ids or ""), None
    check_prompts(config, [ids])
    stop = check_request(config, max_new_tokens, every, sampling, stop_tokens)
    check_positions(config, len(ids) + max_new_tokens)
    generator = kind.from_checkpoint(directory, dtype=dtype, **places)
    text = None if decode is None else Text(decode, stop_strings)
    conversation = generator.read([ids])
    stream = generator.stream(conversation, max_new_tokens, sampling=sampling, stop_tokens=stop, every=every)
    for part in stream:
        new = [int(token) for token in part[0] if token >= 0]
        if text is None:
            yield "".join(f"{token} " for token in new)
            continue
        yield text.feed([token for token in new if token not in stop])
        if text.ended:
            return
    if text is not None:
        yield text.feed((), last=True)


def _generator(framework: str | None, device: str | None) -> tuple[Any, dict[str, str]]:
    """Return the framework's generator, and what it must know to be made."""
    chosen = framework or ("torch" if find_spec("torch") else "jax")
    if chosen not in ("torch", "jax"):
        raise ArgumentError(f"framework must be torch or jax; it is {framework!r}.")
    if chosen == "jax" and device is not None:
        raise ArgumentError("--device is for torch; JAX takes its device from JAX_PLATFORMS.")
    try:
        if chosen == "jax":
            from refold.generate.jax import Generator as Found
        else:
            from refold.generate.torch import Generator as Found  # type: ignore[assignment]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != chosen:
            raise
        raise MissingDependency(f"framework {chosen} is not installed (pip install refold[{chosen}]).") from error
    return Found, {} if device is None else {"device": device}
