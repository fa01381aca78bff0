"""`jaxslm generate`: prompts from the command line or a file, samples to the terminal or a file."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxslm.files import check_destination
from jaxslm.generation import Generator, OnTokens
from jaxslm.prompts import Prompt
from jaxslm.rows import Row, Stats
from jaxslm.sampling import Sampling
from jaxslm.sharding import make_mesh
from jaxslm.tokenizer import FILE, Tokenizer, load_tokenizer
from jaxslm.weights import load

RULER = "-" * 15
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


@dataclass(frozen=True)
class Sample:
    """A prompt and what was made of it.

    Attributes:
        prompt: its text, or None where token ids were given and there is no tokenizer.
        ids: int32, prompt and new tokens.
        row: what there is to tell.
    """

    prompt: str | None
    ids: np.ndarray
    row: Row

    def to_json(self) -> dict[str, Any]:
        """A line of the JSONL file."""
        return {
            "prompt": self.prompt,
            "text": self.row.text,
            "prompt_ids": self.ids[: self.row.prompt_tokens].tolist(),
            "new_ids": self.ids[self.row.prompt_tokens :].tolist(),
            "finish": self.row.finish,
        }

    def text(self) -> str:
        """Prompt and new text; ids where there is no tokenizer."""
        if self.prompt is None or self.row.text is None:
            return _spaced(self.ids)
        return self.prompt + self.row.text


def sample(
    folder: Path,
    *,
    prompt: str | None,
    prompts: Path | None,
    prompt_ids: tuple[int, ...],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    samples: int,
    batch_size: int,
    stop: tuple[str, ...],
    ignore_end: bool,
    special: bool,
    tokenizer: Path | None,
    mesh: tuple[int, int, int] | None,
    stream: bool,
    jsonl: Path | None,
    overwrite: bool,
) -> None:
    """Generates and writes; the arguments are the command's.

    Raises:
        ValueError: they do not fit each other, the model or its tokenizer.
        OSError: a file cannot be read or written.
    """
    if samples < 1 or batch_size < 1:
        raise ValueError(f"--samples {samples} and --batch-size {batch_size}: give 1 or more")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed {seed}: give 0 to {2**32 - 1}")
    if jsonl is not None:
        check_destination(jsonl, overwrite=overwrite)
    asked = _prompts(prompt, prompts, prompt_ids)
    if stream and (len(asked) * samples > 1 or jsonl is not None):
        raise ValueError("--stream shows one sample of one prompt as it is made: drop --jsonl, "
                         "--prompts and --samples")  # fmt: skip
    known = _tokenizer(folder, tokenizer)
    if known is None and any(isinstance(one, str) for one in asked.values()):
        raise ValueError(f"{folder} has no {FILE}: name one by --tokenizer, or give --prompt-ids")
    stops = tuple(_unescaped(text) for text in stop)
    if known is None and stops:
        raise ValueError(f"--stop needs a tokenizer, {folder} has none: name one by --tokenizer")
    devices = None if mesh is None else make_mesh(*mesh, jax.devices())
    generator = Generator(load(folder, mesh=devices))
    names = [name for name in asked for _ in range(samples)]
    encoded = generator.encode(list(asked.values()), known, list(asked), special=special)
    ids = dict(zip(asked, encoded, strict=True))
    texts = {
        name: one if isinstance(one, str) else None if known is None else known.decode(ids[name])
        for name, one in asked.items()
    }
    key = jax.random.key(seed)

    def batches(on_tokens: OnTokens | None) -> Iterator[list[Sample]]:
        for start in range(0, len(names), batch_size):
            part = names[start : start + batch_size]
            # A shorter last batch is filled up with what is thrown away: it needs no new program.
            filled = part + part[-1:] * (batch_size - len(part) if start else 0)
            numbers = np.arange(start, start + len(filled))
            rows, stats = generator(
                [ids[name] for name in filled], max_new_tokens=max_new_tokens, sampling=sampling,
                key=jax.vmap(jax.random.fold_in, (None, 0))(key, numbers), tokenizer=known,
                stop=stops, end_of_text=None if ignore_end else "tokenizer", on_tokens=on_tokens,
                names=filled,
            )  # fmt: skip
            stats = replace(stats, rows=stats.rows[: len(part)])
            told = zip(part, rows, stats.rows, strict=False)
            yield [Sample(texts[name], tokens, row) for name, tokens, row in told]
            where = f"{start + len(part)} of {len(names)}: " if len(names) > batch_size else ""
            _tell(where, stats, generator.config.context)

    if jsonl is not None:
        _write(jsonl, batches(None), overwrite=overwrite)
        return
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if stream:
        (name,) = names
        head = texts[name]
        print(_spaced(ids[name]) + " " if head is None else head, end="", flush=True)
        for _ in batches(_show):
            print(flush=True)
        return
    for done in batches(None):
        for one in done:
            print(one.text())
            if len(names) > 1:
                print(RULER)
        sys.stdout.flush()


def _show(row: int, new: list[int], text: str | None) -> None:
    """Prints new text as it is made."""
    del row
    print(_spaced(new) + " " if text is None else text, end="", flush=True)


def _write(path: Path, batches: Iterator[list[Sample]], *, overwrite: bool) -> None:
    """Writes samples as JSON lines; what a failure leaves is kept as PATH.partial.

    Raises:
        ValueError, OSError, RuntimeError: as the batches, with what was kept.
    """
    partial, count = path.with_name(path.name + ".partial"), 0
    if partial.exists() and not overwrite:
        raise FileExistsError(
            f"{partial} holds samples of a run that failed: move it away, or pass --overwrite"
        )
    try:
        with partial.open("w", encoding="utf-8") as file:
            for done in batches:
                file.writelines(json.dumps(one.to_json()) + "\n" for one in done)
                file.flush()
                count += len(done)
    except BaseException:
        if count:
            print(f"jaxslm: {count} finished samples are in {partial}", file=sys.stderr)
        else:
            partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def _spaced(ids: Any) -> str:
    return " ".join(str(id_) for id_ in ids)


def _prompts(
    prompt: str | None, prompts: Path | None, prompt_ids: tuple[int, ...]
) -> dict[str, Prompt]:
    """The prompts by what errors call them, from where they were given."""
    given = [
        name
        for name, value in (
            ("--prompt", prompt),
            ("--prompts", prompts),
            ("--prompt-ids", prompt_ids or None),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give one of them")
    if prompts is not None:
        return _read_prompts(prompts)
    if prompt_ids:
        return {"--prompt-ids": np.array(prompt_ids, np.int64)}
    return {"the prompt": prompt or ""}


def _read_prompts(path: Path) -> dict[str, Prompt]:
    """Prompts of a text file, one a line, or of the field `prompt` of a .jsonl file."""
    suffix = path.suffix.lower()
    if suffix in (".json", ".ndjson"):
        raise ValueError(f"{path}: name it .jsonl, one object a line, or give a text file")
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    found: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        name, line = f"{path} line {number}", line.removesuffix("\r")
        if not line.strip():
            continue
        if suffix != ".jsonl":
            found[name] = line
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise ValueError(f'{name}: expected {{"prompt": "..."}}')
        found[name] = value["prompt"]
    if not found:
        raise ValueError(f"{path} holds no prompt: write one a line")
    return found


def _tokenizer(folder: Path, named: Path | None) -> Tokenizer | None:
    if named is not None:
        return load_tokenizer(named)
    return load_tokenizer(folder / FILE) if (folder / FILE).is_file() else None


def _unescaped(text: str) -> str:
    r"""A stop string as typed in a shell, where \n is two characters."""
    return re.sub(r"\\([nrt\\])", lambda found: ESCAPES[found[1]], text)


def _tell(where: str, stats: Stats, context: int | None) -> None:
    """A line on what a batch took, on stderr."""
    ends: dict[str, int] = {}
    for row in stats.rows:
        ends[row.finish] = ends.get(row.finish, 0) + 1
    words = {
        "length": "as many as asked for",
        "end_of_text": "at end-of-text",
        "stop": "at a stop string",
        "context": f"at the model's context of {context or 0:,} tokens",
    }
    ended = ", ".join(
        words[finish] if len(stats.rows) == 1 else f"{count} {words[finish]}"
        for finish, count in ends.items()
    )
    speed = stats.tokens_per_second
    print(
        f"{where}{stats.new_tokens:,} tokens in {stats.seconds:.2f} s, the first after "
        f"{stats.first_seconds:.2f} s"
        + (f", then {speed:,.0f} a second" if speed == speed else "")
        + f"; ended {ended}",
        file=sys.stderr,
    )
