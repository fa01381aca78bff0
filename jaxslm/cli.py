"""The command line: inspect | convert | check | data | train | plan | export | generate | eval."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from jaxslm.libtpu import quiet_without_tpu

BAD_INPUT, FAILED, INTERNAL, INTERRUPTED = 2, 1, 70, 130
# Packages that an extra brings.
EXTRAS = {"torch": "torch", "libtpu": "plan", "jax_cuda12_plugin": "plan-cuda"}

Fields = Annotated[
    tuple[str, ...],
    arg(metavar="FIELD=VALUE ...", help="config fields that the file does not give: n_head=16"),
]
Preset = Annotated[
    Literal["lumen-3m", "gpt-250m", "ripple"] | None,
    arg(help="a config of the original models, where the file does not give one"),
]
Integers = Annotated[tuple[str, ...], arg(metavar="INT[,INT ...]")]
Mesh = Annotated[
    tuple[int, int, int] | None,
    arg(metavar="DATA FSDP TENSOR", help="devices on each axis of the mesh; None for one device"),
]

app = tyro.extras.SubcommandApp()


@app.command
def inspect(
    source: Positional[Path],
    /,
    config: Fields = (),
    preset: Preset = None,
    json: bool = False,
) -> int:
    """Say what a checkpoint is, without reading its weights.

    Prints the model, its config and where each field comes from, parameters, dtypes, tied tensors,
    what else the file holds (optimizer, step), and whether the tensors fit. Takes .pt, .pth and
    .bin files (old and new format), .safetensors, sharded safetensors, model folders, and the
    folders of training runs. No torch is needed, and no code in the file is ever run.

    Example: jaxslm inspect ckpt.pt

    Args:
        source: checkpoint file or folder.
        json: print JSON.
    """
    from convert.inspection import inspect_path, print_inspection
    from train.config import is_run

    if is_run(source):
        _use_host()
        from train.inspection import inspect_run, print_run

        run = inspect_run(source)
        _print_json(run) if json else print_run(run, _console())
        return 0
    found = inspect_path(source, overrides=config, preset=preset)
    if json:
        _print_json(found)
    else:
        print_inspection(found, _console())
    return 0


@app.command
def convert(
    source: Positional[Path],
    destination: Positional[Path],
    /,
    config: Fields = (),
    preset: Preset = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
    shard_size: str | None = None,
    with_optimizer: bool = False,
    allow_nonfinite: bool = False,
    tokenizer: Path | None = None,
    check: bool = False,
    overwrite: bool = False,
) -> int:
    """Convert a torch checkpoint to a model folder, or a model folder to torch.

    The direction follows from the source. A model folder holds config.json, model.safetensors and
    parity.json (hashes of the source and of each tensor, versions, the check's figures). The way
    back writes a .pt, .pth or .bin state dict (needs torch), one .safetensors file, or, to a name
    without suffix, a folder of safetensors shards. Every byte is kept unless --dtype says so, and
    the output appears whole or not at all.

    Example: jaxslm convert ckpt.pt out/ --check && jaxslm convert out/ back.pt

    Args:
        source: torch checkpoint in any container that `jaxslm inspect` reads, or model folder.
        destination: model folder, or torch file or folder, to create.
        dtype: cast every tensor; a number that overflows is an error.
        shard_size: largest shard of a safetensors folder, such as 500MB or 5GB.
        with_optimizer: convert the state of torch's AdamW too, as optimizer.safetensors in the
            folder; the way back then writes a training checkpoint. Moments keep their own dtype,
            whatever --dtype says.
        allow_nonfinite: convert weights that hold NaN or infinity.
        tokenizer: a tokenizer.json or meta.pkl to travel in the model folder; one that lies in a
            source folder is taken along, or else that of the folder overwritten is kept.
        check: run `jaxslm check` first, record its figures, and write nothing if it fails.
        overwrite: replace an earlier output.
    """
    from convert.files import TORCH_SUFFIXES, folder_to_torch, parse_size, torch_to_folder
    from jaxslm.weights import is_model_folder

    _refuse_run(source)
    if is_model_folder(source):
        if config or preset or allow_nonfinite or check or tokenizer:
            raise ValueError(
                f"{source} is a model folder: --config, --preset, --allow-nonfinite, --tokenizer "
                "and --check are for conversion from torch (use `jaxslm check` on the folder)"
            )
        size = None if shard_size is None else parse_size(shard_size)
        done = folder_to_torch(
            source, destination, dtype=dtype, shard_size=size, with_optimizer=with_optimizer,
            overwrite=overwrite,
        )  # fmt: skip
    else:
        if shard_size is not None:
            raise ValueError("--shard-size is for conversion from a model folder to torch")
        if destination.suffix.lower() in (*TORCH_SUFFIXES, ".safetensors"):
            raise ValueError(
                f"{source} is no model folder, so it is converted to one: name a folder instead "
                f"of {destination}"
            )
        done = torch_to_folder(
            source, destination, overrides=config, preset=preset, dtype=dtype,
            with_optimizer=with_optimizer, allow_nonfinite=allow_nonfinite, tokenizer=tokenizer,
            overwrite=overwrite, check=_check_before if check else None,
        )  # fmt: skip
    console = _console()
    console.print(
        f"{done.destination}: {type(done.config).__name__}, {done.tensors} tensors, "
        f"{done.parameters:,} parameters, {done.nbytes / 1e6:.1f} MB"
    )
    if done.identical is not None:
        console.print(
            f"{done.identical} of {done.tensors} tensors have the bytes of the checkpoint that "
            f"{source} came from"
        )
    for note in done.notes:
        console.print(note)
    return 0


@app.command
def check(
    source: Positional[Path],
    /,
    config: Fields = (),
    preset: Preset = None,
    against: str | None = None,
    tokens: Path | None = None,
    lengths: Integers = (),
    bfloat16: bool = False,
    seed: int = 0,
    steps: int | None = None,
    batch_size: int | None = None,
    accumulation: int | None = None,
    json: Path | None = None,
    report: Path | None = None,
) -> int:
    """Prove that the Flax model and the torch model are the same, or say where they part.

    Climbs a ladder: weights' bytes, RoPE tables, embedding, every layer, logits, loss, the gradient
    of every tensor, one AdamW step, 20 greedy tokens; in float64 against torch in float64 (limit
    1e-10 relative) and in float32 against torch's own float32 error (limit 4 times). With --steps
    it also trains both for that many updates, by the original's recipe and on from the checkpoint's
    AdamW if it holds one: losses agree to 1e-9 in float64, and so they do after ten steps in torch
    are converted and go on in JAX, and the other way round. Exit status 0 if all passes, 1 if not,
    2 for bad input. Needs torch.

    Example: jaxslm check ckpt.pt --report parity.html

    Args:
        source: torch checkpoint, or model folder.
        against: a torch class in a file of yours, FILE.py:CLASS, in place of our counterpart. The
            file is run; the class is called with its config.
        tokens: raw uint16 file of token ids (as nanoGPT writes), in place of random tokens.
        lengths: sequence lengths of the forward passes, in place of the model's edges; training
            takes the longest, in place of 128.
        bfloat16: climb the ladder in bfloat16 too.
        seed: of the random tokens and of the batches.
        steps: train both sides for this many updates too; 100 say most.
        batch_size: sequences in an update of --steps; 4 by default.
        accumulation: microbatches that its batch is cut into; 2 by default.
        json: write the whole report as JSON.
        report: write it as one self-contained HTML page, with figures.
    """
    from convert.parity.report import print_report, write_json
    from convert.parity.subject import load_subject

    for output, mark in ((json, b'"schema"'), (report, b"<title>parity ")):
        if output is not None:
            _check_report_path(output, mark)
    if json is not None and report is not None and json.resolve() == report.resolve():
        raise ValueError(f"--json and --report both name {json}: name two files")
    _refuse_run(source)
    sizes = _integers("--lengths", lengths)
    subject = load_subject(source, overrides=config, preset=preset)
    real = None if tokens is None else _read_tokens(tokens)
    training = None
    if steps is None and (batch_size, accumulation) != (None, None):
        raise ValueError("--batch-size and --accumulation are of the updates of --steps: give it")
    if steps is not None:
        training = _training(
            subject.config, source, config, preset, steps=steps,
            batch_size=4 if batch_size is None else batch_size,
            accumulation=2 if accumulation is None else accumulation,
            length=max(sizes, default=None),
        )  # fmt: skip
    result = _run_check(
        subject, against=against, tokens=real, lengths=sizes or None, seed=seed,
        training=training, dtypes=("float32", "bfloat16") if bfloat16 else ("float32",),
    )  # fmt: skip
    print_report(result, _console())
    if json is not None:
        write_json(result, json)
    if report is not None:
        from convert.parity.report_html import write_html

        write_html(result, report)
    return 0 if result.passed else FAILED


@app.command
def data(
    action: Positional[Literal["prepare"]],
    /,
    input: Annotated[tuple[str, ...], arg(metavar="PATH ...")],
    tokenizer: str,
    out: Path,
    val_fraction: float = 0.1,
    field: str = "text",
    overwrite: bool = False,
) -> int:
    """Turn text into token files for training.

    Writes OUT/train, OUT/val and the tokenizer. Inputs are .txt files, .jsonl files, folders of
    source code, and `python-stdlib`, the running interpreter's own sources.

    Example: jaxslm data prepare --input book.txt --tokenizer bpe:2048 --out data/

    Args:
        action: prepare.
        input: files, folders, or python-stdlib.
        tokenizer: byte; char; bpe:N, trained on the input to N ids; or the path of a tokenizer.json
            or a meta.pkl.
        out: folder to create.
        val_fraction: share of the text that is held out.
        field: of each line of a .jsonl file.
        overwrite: replace an earlier output of this command.
    """
    del action
    from rich.console import Console

    from train.prepare import prepare

    with Console(stderr=True).status("preparing") as status:
        done = prepare(
            input, tokenizer=tokenizer, out=out, val_fraction=val_fraction, field=field,
            overwrite=overwrite, progress=status.update,
        )  # fmt: skip
    _console().print(str(done))
    return 0


@app.command
def train(config: Positional[Path], /, resume: bool = False) -> int:
    """Train a model by a config file; `jaxslm train CONFIG.py --help` lists its fields.

    Example: jaxslm train configs/lumen_3m.py --optim.lr 1e-3 --out runs/first

    Args:
        config: a Python file that sets `config`, or the folder of a run.
        resume: go on from the run's latest whole checkpoint.
    """
    raise AssertionError("main() hands these arguments to train.command")


@app.command
def plan(config: Positional[Path], /) -> int:
    """Compile a run for devices that need not be there; `jaxslm plan --help` lists them.

    Prints whether it fits, memory, what the devices exchange, and the least time of an update.

    Example: jaxslm plan configs/gpt_250m.py --topology v5e:4x4 --mesh.fsdp 4

    Args:
        config: a Python file that sets `config`, or the folder of a run.
    """
    raise AssertionError("main() hands these arguments to train.plan_command")


@app.command
def export(
    run: Positional[Path],
    destination: Positional[Path],
    /,
    step: int | None = None,
    with_optimizer: bool = False,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint of a training run as a model folder.

    Example: jaxslm export runs/first out/ && jaxslm convert out/ model.pt

    Args:
        run: the run's folder.
        destination: model folder to create.
        step: of the checkpoint; the latest that is whole by default.
        with_optimizer: AdamW's state too, for `convert --with-optimizer` or `--init-from`.
        overwrite: replace an earlier model folder.
    """
    _use_host()
    from train.export import export as export_run

    done = export_run(
        run, destination, step=step, with_optimizer=with_optimizer, overwrite=overwrite
    )
    console = _console()
    for note in done.notes:
        console.print(note)
    console.print(
        f"{destination}: {type(done.config).__name__}, {done.parameters:,} parameters, "
        f"update {done.step}"
    )
    return 0


@app.command
def generate(
    folder: Positional[Path],
    /,
    prompt: str | None = None,
    prompts: Path | None = None,
    prompt_ids: Integers = (),
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 200,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    samples: int = 1,
    stop: tuple[str, ...] = (),
    ignore_end: bool = False,
    special: bool = False,
    stream: bool = False,
    jsonl: Path | None = None,
    batch_size: int = 8,
    tokenizer: Path | None = None,
    mesh: Mesh = None,
    overwrite: bool = False,
) -> int:
    r"""Continue prompts with a model.

    Prints each prompt with its continuation; what it took goes to stderr. The same seed gives the
    same text, whatever the batch size. Without a prompt it begins a document, if the tokenizer has
    an end-of-text token to begin after.

    Example: jaxslm generate out/ --prompt "Well, Prince," --tokens 200 --stream

    Args:
        folder: model folder.
        prompt: text to continue.
        prompts: file of prompts: one a line, or .jsonl with the field `prompt`.
        prompt_ids: token ids to continue, for a model without tokenizer.
        tokens: new tokens for each prompt at most; a model with a context ends there.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens; None for all.
        top_p: draw from the fewest likeliest tokens that sum to this probability.
        min_p: draw from tokens of at least this share of the likeliest one's probability.
        repetition_penalty: above 1, tokens that occurred before become less likely.
        seed: of the draws.
        samples: continuations of each prompt.
        stop: strings at whose end a continuation ends; \n is a line end.
        ignore_end: go on after end-of-text.
        special: names of special tokens in a prompt, such as <|endoftext|>, become their ids.
        stream: print the text as it is made.
        jsonl: write the samples to this file, one JSON object a line, in place of printing them;
            what a failure leaves is in FILE.partial.
        batch_size: prompts that are continued at one time.
        tokenizer: tokenizer.json or meta.pkl, in place of the folder's.
        overwrite: replace an earlier file.
    """
    from jaxslm.compilation import use_compilation_cache
    from jaxslm.samples import sample
    from jaxslm.sampling import Sampling

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty,
    )  # fmt: skip
    use_compilation_cache(least_seconds=0.0)
    sample(
        folder, prompt=prompt, prompts=prompts,
        prompt_ids=_integers("--prompt-ids", prompt_ids), max_new_tokens=tokens,
        sampling=sampling, seed=seed, samples=samples, batch_size=batch_size, stop=stop,
        ignore_end=ignore_end, special=special, tokenizer=tokenizer, mesh=mesh, stream=stream,
        jsonl=jsonl, overwrite=overwrite,
    )  # fmt: skip
    return 0


@app.command(name="eval")
def evaluate(
    model: Positional[Path],
    /,
    data: Path,
    lengths: Integers = (),
    tokenizer: Path | None = None,
    batch_size: int | None = None,
    batches: int | None = None,
    mesh: Annotated[tuple[int, int, int], arg(metavar="DATA FSDP TENSOR")] = (-1, 1, 1),
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Measure a model's loss on held-out tokens, by length and by position.

    Prints loss, perplexity, bits a token and bits a byte of text, and the loss at positions 1, 2,
    3-4, 5-8 and so on. Every token but a file's first counts once. Ripple without absolute
    positions also takes lengths beyond the one that it was trained at.

    Example: jaxslm eval out/ --data data/val --lengths 256,512,1024 --plot loss.png

    Args:
        model: model folder, from `jaxslm convert` or `jaxslm export`.
        data: token file, or folder of token files; of both splits in it, val.
        lengths: tokens of a sequence; the model's context by default.
        tokenizer: tokenizer.json or meta.pkl to count bytes by, where neither folder has one.
        batch_size: sequences of a batch, over all devices; about 8,192 tokens by default.
        batches: read only so many of each length.
        mesh: sizes of the device mesh; -1 is the devices left.
        json: write all figures, each position's among them, as JSON.
        plot: draw loss against position and length to this PNG.
    """
    from rich.console import Console

    from train.evaluate import evaluate as measure
    from train.evaluation_plot import plot as draw
    from train.evaluation_report import check_outputs, print_evaluation, write_json

    check_outputs(json, plot)
    with Console(stderr=True).status("evaluating") as status:
        found = measure(
            model, data, lengths=_integers("--lengths", lengths), tokenizer=tokenizer,
            batch_size=batch_size, batches=batches, mesh=mesh, progress=status.update,
        )  # fmt: skip
    print_evaluation(found, _console())
    if json is not None:
        write_json(found, json)
    if plot is not None:
        draw(found, plot)
    if found.failure is not None:
        raise ValueError(found.failure)
    return 0


class ParityFailed(Exception):
    """The check that a conversion was asked to pass has failed; its report is printed."""


def _integers(option: str, words: tuple[str, ...]) -> tuple[int, ...]:
    """Whole numbers, separated by spaces or commas."""
    parts = [part for word in words for part in word.split(",")]
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise ValueError(f"{option} {' '.join(words)}: give whole numbers, as in 256,512") from None


def _use_host() -> None:
    """Leaves accelerators alone: a run may be training on them, and may not fit one."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _refuse_run(source: Path) -> None:
    """A training run is no checkpoint to convert."""
    from train.config import is_run

    if is_run(source):
        raise ValueError(
            f"{source} is a training run: make a model folder of it first, by "
            f"`jaxslm export {source} out/`"
        )


def _check_before(source) -> dict[str, object]:
    """Checks an open torch checkpoint for `convert --check`."""
    from convert.parity.report import figures, print_report
    from convert.parity.subject import subject_of

    result = _run_check(subject_of(source))
    print_report(result, _console())
    if not result.passed:
        raise ParityFailed("parity failed: nothing was written")
    return figures(result)


def _training(model, source: Path, overrides: tuple[str, ...], preset: str | None, **asked):
    """What `check --steps` asks for: the original's recipe, our step, the checkpoint's AdamW."""
    from convert.parity.training_plan import Asked, source_optimizer
    from jaxslm.models import model_name
    from train.config import RECIPES
    from train.trajectory import Trainer

    optimizer, note = source_optimizer(source, overrides=overrides, preset=preset)
    return Asked(
        trainer=Trainer, recipe=RECIPES[model_name(model)], optimizer=optimizer, note=note, **asked
    )


def _run_check(subject, **options):
    """The check with a line of progress on the terminal."""
    from rich.console import Console

    from convert.parity.ladder import check

    with Console(stderr=True).status("checking") as status:
        return check(subject, progress=lambda words: status.update(f"checking: {words}"), **options)


def _check_report_path(path: Path, mark: bytes) -> None:
    """Refuses to replace anything but an earlier report: not the checkpoint, not a source file."""
    from jaxslm.files import check_destination

    check_destination(path, overwrite=True)
    if path.is_file():
        with path.open("rb") as file:
            if mark not in file.read(400).lower():
                raise FileExistsError(f"{path} exists and is no earlier report: name another file")


def _read_tokens(path: Path):
    """Token ids of a raw uint16 file, int64 [n]."""
    import numpy as np

    size = path.stat().st_size
    if size % 2 or size < 4:
        raise ValueError(
            f"{path} has {size} bytes: a raw uint16 token file has an even number, 4 up"
        )
    return np.fromfile(path, np.uint16).astype(np.int64)


def _console():
    from rich.console import Console

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:  # Console's own exits with 1, which is failed parity
            raise BrokenPipeError

    return OurConsole(soft_wrap=True, highlight=False, markup=False)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


@contextlib.contextmanager
def _short_errors() -> Iterator[None]:
    """Turns what a user can cause into one message on stderr and an exit status."""
    try:
        yield
    except ParityFailed as error:
        _fail(str(error), FAILED)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            _internal(error)
        _fail(f"this needs {error.name}: pip install 'jaxslm[{extra}]'", BAD_INPUT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BAD_INPUT)
    except (ValueError, OSError) as error:
        _fail(_words(error), BAD_INPUT)
    except MemoryError:
        _fail("out of memory", BAD_INPUT)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            _internal(error)
        _fail(f"the devices' memory is not enough: take smaller batches ({error})", BAD_INPUT)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        _internal(error)


def _words(error: Exception) -> str:
    """An error's message; an operating-system error's with its file, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _internal(error: Exception) -> None:
    if os.environ.get("JAXSLM_TRACEBACK"):
        traceback.print_exception(error)
    _fail(
        f"internal error, please report it: {type(error).__name__}: {error} "
        "(JAXSLM_TRACEBACK=1 shows where)",
        INTERNAL,
    )


def _fail(message: str, status: int) -> None:
    print(f"jaxslm: {message}", file=sys.stderr)
    sys.exit(status)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; exits with its status.

    Args:
        arguments: in place of the process's own.
    """
    with _short_errors():
        quiet_without_tpu()
        words = sys.argv[1:] if arguments is None else arguments
        if words[:1] == ["train"]:  # its options are the fields of the config that it names
            from train.command import command

            sys.exit(command(words[1:]))
        if words[:1] == ["plan"]:
            _use_host()
            from train.plan_command import command as plan_command

            sys.exit(plan_command(words[1:], _console()))
        status = app.cli(
            prog="jaxslm",
            description="Lumen, GPT and Ripple between torch and JAX: exact, and proven so.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        print(end="", flush=True)  # sys.stdout may be closed
        sys.exit(status)


if __name__ == "__main__":
    main()
