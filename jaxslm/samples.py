"""`jaxslm generate`: prompts from the command line or a file, samples to the terminal or a file."""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxslm.files import atomic_output, check_destination
from jaxslm.generation import Generator, Prompt
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
        prompt: as it was given.
        ids: int32, prompt and new tokens.
        row: what there is to tell.
    """

    prompt: Prompt
    ids: np.ndarray
    row: Row

    def to_json(self) -> dict[str, Any]:
        """A line of the JSONL file."""
        return {
            "prompt": self.prompt if isinstance(self.prompt, str) else None,
            "text": self.row.text,
            "prompt_ids": self.ids[: self.row.prompt_tokens].tolist(),
            "new_ids": self.ids[self.row.prompt_tokens :].tolist(),
            "finish": self.row.finish,
        }

    def words(self) -> str:
        """Prompt and new text; ids where there is no tokenizer."""
        if self.row.text is None:
            return " ".join(map(str, self.ids.tolist()))
        if isinstance(self.prompt, str):
            return self.prompt + self.row.text
        return self.row.text


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
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: give 0 to 2^63 - 1")
    if jsonl is not None:
        check_destination(jsonl, overwrite=overwrite)
    texts = _prompts(prompt, prompts, prompt_ids)
    if stream and (len(texts) * samples > 1 or jsonl is not None):
        raise ValueError("--stream shows one sample of one prompt as it is made: drop --jsonl, "
                         "--prompts and --samples")  # fmt: skip
    known = _tokenizer(folder, tokenizer)
    stops = tuple(_unescaped(text) for text in stop)
    if known is None and any(isinstance(text, str) for text in texts):
        raise ValueError(f"{folder} has no {FILE}: name one by --tokenizer, or give --prompt-ids")
    if known is None and stops:
        raise ValueError(
            f"--stop needs a tokenizer, and {folder} has none: name one by --tokenizer"
        )
    encoded = [_encoded(text, known, special) for text in texts]
    devices = None if mesh is None else make_mesh(*mesh, jax.devices())
    generator = Generator(load(folder, mesh=devices))
    key = jax.random.key(seed)

    def batches(on_tokens: Callable[[int, list[int]], None] | None) -> Iterator[list[Sample]]:
        numbered = [(number, n) for n, number in enumerate(np.repeat(range(len(texts)), samples))]
        for start in range(0, len(numbered), batch_size):
            part = numbered[start : start + batch_size]
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.array([n for _, n in part]))
            rows, stats = generator(
                [encoded[number] for number, _ in part], max_new_tokens=max_new_tokens,
                sampling=sampling, key=keys, tokenizer=known, stop=stops,
                end_of_text=None if ignore_end else "tokenizer", on_tokens=on_tokens,
            )  # fmt: skip
            yield [
                Sample(texts[number], ids, row)
                for (number, _), ids, row in zip(part, rows, stats.rows, strict=True)
            ]
            _tell(stats, generator.config.context)

    if jsonl is not None:
        with atomic_output(jsonl, overwrite=overwrite) as path, path.open("w") as file:
            for done in batches(None):
                file.writelines(json.dumps(one.to_json()) + "\n" for one in done)
        return
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    many = len(texts) * samples > 1
    shown = _Stream(texts[0], encoded[0], known) if stream else None
    for done in batches(shown):
        for one in done:
            if shown is None:
                print(one.words())
            else:
                shown.end(one)
            if many:
                print(RULER)
        sys.stdout.flush()


class _Stream:
    """Prints new text as it is made; what may still become another character is held back."""

    def __init__(self, prompt: Prompt, ids: Prompt, tokenizer: Tokenizer | None):
        self._tokenizer, self._ids, self._shown = tokenizer, [], ""
        words = prompt if isinstance(prompt, str) else "" if tokenizer else _spaced(ids) + " "
        print(words, end="", flush=True)

    def __call__(self, row: int, new: list[int]) -> None:
        del row
        self._ids += new
        if self._tokenizer is None:
            print(_spaced(new), end=" ", flush=True)
            return
        known = [id_ for id_ in self._ids if id_ < self._tokenizer.vocab_size]
        self._show(self._tokenizer.decode(known).rstrip("\N{REPLACEMENT CHARACTER}"))

    def end(self, one: Sample) -> None:
        """Prints what was held back."""
        self._show(one.row.text or "")
        print(flush=True)

    def _show(self, text: str) -> None:
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


def _spaced(ids: Any) -> str:
    return " ".join(str(id_) for id_ in ids)


def _prompts(prompt: str | None, prompts: Path | None, prompt_ids: tuple[int, ...]) -> list[Prompt]:
    """The prompts, from where they were given."""
    given = [name for name, value in (("--prompt", prompt), ("--prompts", prompts)) if value is not
             None] + (["--prompt-ids"] if prompt_ids else [])  # fmt: skip
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give one of them")
    if prompts is not None:
        return list(_read_prompts(prompts))
    if prompt_ids:
        return [np.array(prompt_ids, np.int64)]
    return ["" if prompt is None else prompt]


def _read_prompts(path: Path) -> list[str]:
    """Prompts of a text file, one a line, or of the field `prompt` of a .jsonl file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            found.append(line)
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise ValueError(f'{path} line {number}: expected {{"prompt": "..."}}')
        found.append(value["prompt"])
    if not found:
        raise ValueError(f"{path} holds no prompt: write one a line")
    return found


def _tokenizer(folder: Path, named: Path | None) -> Tokenizer | None:
    if named is not None:
        return load_tokenizer(named)
    return load_tokenizer(folder / FILE) if (folder / FILE).is_file() else None


def _encoded(prompt: Prompt, tokenizer: Tokenizer | None, special: bool) -> Prompt:
    """Ids; the empty text is the end-of-text token, after which documents begin."""
    if not isinstance(prompt, str) or tokenizer is None:
        return prompt
    if not prompt:
        if tokenizer.end_of_text is None:
            raise ValueError(
                f"the prompt is empty, and a {tokenizer.kind} tokenizer has no end-of-text token "
                "to begin after: give --prompt"
            )
        return np.array([tokenizer.end_of_text], np.int32)
    return tokenizer.encode(prompt, special=special)


def _unescaped(text: str) -> str:
    r"""A stop string as typed in a shell, where \n is two characters."""
    return re.sub(r"\\([nrt\\])", lambda found: ESCAPES[found[1]], text)


def _tell(stats: Stats, context: int | None) -> None:
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
        f"{stats.new_tokens:,} tokens in {stats.seconds:.2f} s, the first after "
        f"{stats.first_seconds:.2f} s"
        + (f", then {speed:,.0f} a second" if speed == speed else "")
        + f"; ended {ended}",
        file=sys.stderr,
    )
