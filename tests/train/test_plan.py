"""Plans of runs, by the TPU compiler itself where it is installed."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxslm.cli import main
from jaxslm.models import LumenConfig, RippleConfig
from jaxslm.sharding import make_mesh
from jaxslm.weights import abstract_parameters
from train.collectives import Collective, collectives
from train.config import DataConfig, MeshConfig, TrainConfig
from train.hardware import CHIPS, chip, flops_per_token
from train.plan import Memory, Plan, plan_decoding, plan_training, without_cudnn
from train.plan_command import scaled
from train.plan_search import changes, largest_batch, most, ways_to_fit
from train.topology import devices_of

needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="needs the TPU compiler: jaxslm[plan]"
)
SMALL = LumenConfig(
    vocab_size=256, hidden_dim=128, num_layers=3, num_heads=4, num_kv_heads=2,
    intermediate_dim=256, max_seq_len=256,
)  # fmt: skip


@pytest.fixture(autouse=True)
def compiled_as_ever(monkeypatch):
    """Without what makes other tests' programs compile quickly on a CPU."""
    monkeypatch.setattr(jax, "jit", getattr(jax.jit, "func", jax.jit))


def config(**fields) -> TrainConfig:
    return TrainConfig(
        out=Path("run"), model=SMALL, data=DataConfig(batch_size=16, sequence_length=256),
        loss_chunk=None, accumulation=2,
    ) if not fields else replace(config(), **fields)  # fmt: skip


@needs_compiler
def test_a_plan_counts_what_can_be_counted_by_hand():
    run = config()
    plan = plan_training(run, "v5e:2x2", quick=True)
    assert plan.fits
    assert plan.refusal is None
    assert plan.mesh == {"data": 4, "fsdp": 1, "tensor": 1}
    assert plan.tokens == 16 * 256
    assert plan.flops == flops_per_token(SMALL, 256) * plan.tokens
    memory, roofline = plan.memory, plan.roofline
    assert memory is not None
    assert roofline is not None
    parameters = sum(leaf.size for leaf in abstract_parameters(SMALL).values())
    held = 3 * 4 * parameters + 2 * 4 * run.data.batch_size // 4 * 256
    assert held <= memory.arguments <= 1.02 * held  # the compiler pads to its tiles
    assert memory.outputs < 0.01 * memory.arguments  # the state is donated
    assert memory.total == (memory.arguments + memory.temporaries + memory.outputs + memory.code)
    assert roofline.compute == plan.flops / (4 * 197e12 / 6)  # float32, nothing recomputed
    # Data parallelism: each microbatch's gradient is reduced once.
    (reduced,) = [each for each in plan.collectives if each.kind == "all-reduce"]
    gradient = 2 * 3 / 4 * 4 * parameters
    assert 2 * gradient <= reduced.bytes <= 2.1 * gradient
    assert roofline.communication == sum(each.bytes for each in plan.collectives) / 200e9
    assert roofline.seconds == max(roofline.compute, roofline.memory, roofline.communication)
    assert plan.tokens_per_second == plan.tokens / roofline.seconds


@needs_compiler
def test_recomputation_and_dtype_move_the_bound():
    times = {}
    for dtype, remat, chunk in (("bfloat16", "none", None), ("bfloat16", "full", 128)):
        model = replace(SMALL, dtype=dtype, remat=remat)
        plan = plan_training(config(model=model, loss_chunk=chunk), "v5e:2x2", quick=True)
        assert plan.roofline is not None
        times[remat] = plan.roofline.compute
        assert times["none"] == pytest.approx(plan.flops / (4 * 197e12)) or remat == "full"
    factors = sum(leaf.size for name, leaf in abstract_parameters(SMALL).items()
                  if ".w" in name or name == "embedding")  # fmt: skip
    again = 2 * factors * 16 * 256  # the layers' and the head's forward products
    assert plan.recomputed == again
    assert times["full"] == pytest.approx(times["none"] + again / (4 * 197e12))


def faked(limit: int):
    """`plan_training` of a run that takes a byte for each sequence and layer kept."""

    def plan(run: TrainConfig, topology: str, *, quick: bool) -> Plan:
        assert quick
        parts = len(devices_of(topology))
        rows = run.data.batch_size // run.accumulation // parts
        total = rows * {"none": 4, "dots": 2, "full": 1}[run.model.remat]
        memory = Memory(total, 0, 0, 0, limit)
        return Plan(topology, CHIPS[0], {"data": parts}, 1, memory, None, (), 1.0, 0.0, None, 0.0)

    return plan


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (16, {"remat": "--model.remat dots", "accumulation": "--accumulation 4", "mesh": "",
              "batch": "--data.batch-size 32"}),
        (8, {"remat": "--model.remat full", "accumulation": "--accumulation 8", "mesh": "",
              "batch": "--data.batch-size 16"}),
        (1, {"remat": "", "accumulation": "", "mesh": "", "batch": "",
             "all": "--model.remat full --accumulation 16 --mesh.fsdp 4"}),
        (0, {"remat": "", "accumulation": "", "mesh": "", "batch": "", "all": ""}),
    ],
)  # fmt: skip
def test_each_kind_of_change_is_tried_by_itself_and_all_together_if_none_serves(
    limit, expected, monkeypatch
):
    monkeypatch.setattr("train.plan_search.plan_training", faked(limit))
    monkeypatch.setattr("train.plan_search.devices_of", lambda topology: jax.devices()[:1] * 4)
    monkeypatch.setitem(globals(), "devices_of", lambda topology: [None] * 4)
    run = config(data=DataConfig(batch_size=64, sequence_length=256), loss_chunk=128)
    tried: list[str] = []
    ways = ways_to_fit(run, "v5e:2x2", tried.append)
    assert {way.kind: way.options if way.plan.fits else "" for way in ways} == expected
    assert all(way.options for way in ways)
    assert len(tried) == len(set(tried))


def test_the_largest_batch_is_of_each_device(monkeypatch):
    monkeypatch.setattr("train.plan_search.plan_training", faked(44))
    monkeypatch.setattr("train.plan_search.devices_of", lambda topology: jax.devices()[:1] * 4)
    monkeypatch.setitem(globals(), "devices_of", lambda topology: [None] * 4)
    assert largest_batch(config(), "v5e:2x2", lambda words: None) == 11


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    "total", [lambda n: 10 * n, lambda n: 500 + n, lambda n: n * n, lambda n: 10 * -(-n // 8)]
)
def test_most_is_found_to_a_sixteenth_in_few_trials(total, refused):
    for capacity in (0, 9, 10, 25, 501, 503, 530, 1000, 10_000):
        tried = []

        def memory(n, capacity=capacity, tried=tried):
            tried.append(n)
            fits = total(n) <= capacity
            return None if refused and not fits else Memory(total(n), 0, 0, 0, capacity)

        found = most(memory)
        best = max((n for n in range(20_000) if n == 0 or total(n) <= capacity), default=0)
        assert best - max(0, best // 16) <= found <= best
        assert len(tried) <= 12
        assert len(tried) == len(set(tried))


@needs_compiler
def test_decoding_reads_weights_and_cache_once_a_token():
    run = config(mesh=MeshConfig(data=1, tensor=4))
    plan = plan_decoding(run, "v5e:2x2", batch_size=8, length=256, quick=True)
    assert plan.tokens == 8
    assert plan.memory is not None
    assert plan.roofline is not None
    assert plan.roofline.bound_by in ("memory", "communication")
    assert plan.roofline.memory == plan.memory.arguments / 819e9
    kinds = {each.kind for each in plan.collectives}
    assert "all-reduce" in kinds  # of each layer's heads and mlp
    assert plan_decoding(config(), "v5e:2x2", length=256, quick=True).tokens == 4
    with pytest.raises(
        ValueError, match=r"3 row\(s\) cannot be split over the 4 devices of data x fsdp"
    ):
        plan_decoding(config(), "v5e:2x2", batch_size=3, length=256)


@needs_compiler
@pytest.mark.parametrize(
    ("topology", "count", "kind"),
    [("v4:2x2x2", 8, "TPU v4"), ("v5e:1x1", 1, "TPU v5 lite"), ("v5p:2x2x1", 4, "TPU v5"),
     ("v6e:2x4", 8, "TPU v6 lite"), ("v5p:4x4x12", 192, "TPU v5")],
)  # fmt: skip
def test_slices_have_their_devices(topology, count, kind):
    devices = devices_of(topology)
    assert len(devices) == count
    assert devices[0].device_kind == kind
    assert devices[0] not in jax.devices()
    found = chip(kind)
    assert found is not None
    assert found.capacity is not None
    assert found.links is not None


@pytest.mark.skipif(
    find_spec("jax_cuda12_plugin") is None, reason="needs the GPU compiler: jaxslm[plan-cuda]"
)
def test_gpus_of_one_machine_are_planned_with_attention_that_needs_none():
    model = replace(SMALL, dtype="bfloat16")
    plan = plan_training(config(model=model), "h100:2", quick=True)
    assert plan.fits
    assert plan.chip.kind == "NVIDIA H100"
    assert plan.devices == 2
    assert {each.kind for each in plan.collectives} == {"all-reduce"}


def test_cudnn_cannot_be_planned():
    auto = config(model=replace(SMALL, dtype="bfloat16"))
    assert without_cudnn(auto, "tpu") == auto
    assert without_cudnn(auto, "gpu").model.attention == "blockwise"
    named = config(model=replace(SMALL, dtype="bfloat16", attention="cudnn"))
    with pytest.raises(ValueError, match="plan with --model.attention blockwise"):
        without_cudnn(named, "gpu")


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        *((wrong, "v5e: 1x1, 2x2, 2x4") for wrong in ("v5e", "v5e:3x3", "v9:2x2", "", "v5e:")),
        ("h100:3", "h100: 1, 2, 4, 8$"),
        *((wrong, "v5p: more by multiples of 4, up to 6,144 chips")
          for wrong in ("v5p:2x2", "v5p:4x4x6", "v5p:16x16x28", "v5p:4x4x4x4")),
        ("v5e:4x4x4", "v5e: .*16x16$"),
    ],
)  # fmt: skip
def test_other_slices_are_refused_with_those_that_there_are(topology, words):
    with pytest.raises(ValueError, match=f"there is no slice .*{words}"):
        devices_of(topology)


@needs_compiler
def test_collectives_in_loops_count_as_often_as_they_run():
    mesh = make_mesh(1, 4, 1, devices_of("v5e:2x2"))

    def program(x_ND):
        def step(total, x_D):
            # Of maxima the compiler cannot take one after the loop, as it does of sums.
            return total + jax.lax.pmax(x_D, "fsdp"), jax.lax.all_gather(x_D, "fsdp")

        return jax.lax.scan(step, jnp.zeros(x_ND.shape[1]), x_ND)

    spec = PartitionSpec(None, "fsdp")
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    like = jax.ShapeDtypeStruct((7, 4 * 2048), jnp.float32, sharding=NamedSharding(mesh, spec))
    text = jax.jit(mapped).lower(like).compile().as_text()
    assert text is not None
    found = {each.kind: each for each in collectives(text, 4)}
    assert found["all-reduce"] == Collective("all-reduce", 7, 7 * 2 * 0.75 * 2048 * 4)
    assert found["all-gather"].bytes == 7 * 0.75 * 4 * 2048 * 4


def test_collectives_are_read_in_the_forms_that_compilers_write():
    text = """HloModule jit_f

%cond (arg: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %arg = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%chain.1 (p: bf16[8]) -> bf16[8] {
  %p = bf16[8] parameter(0)
  ROOT %all-gather.9 = bf16[32]{0} all-gather(%p), channel_id=3, replica_groups=[2,4]<=[8]
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]) parameter(0)
  %r = f32[8]{0} reduce-scatter(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %s = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%x), channel_id=2
  %f = bf16[8] fusion(%p), kind=kCustom, calls=%chain.1
  %g = bf16[8] fusion(%p), kind=kCustom, calls=%chain.1
  ROOT %t = (s32[], f32[8]) tuple(%i, %r)
}

%known (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %z = f32[8]{0} all-to-all(%x), channel_id=7, replica_groups=[1,8]<=[8]
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %v = () while(%t), condition=%none, body=%known, backend_config={"known_trip_count":{"n":"3"}}
  %b = ((f32[2]{0}, f32[4]{0}), (f32[16]{0}, f32[32]{0})) all-gather-start(%x, %y), channel_id=5
  %c = (f32[4]{0}, f32[8]{0}) all-reduce-start(%x, %y), channel_id=6, replica_groups={}
  %d = f32[4]{0} all-reduce-done(%c)
  ROOT %a = (f32[4]{0}, bf16[2,2]{1,0}) all-reduce(%x, %y), channel_id=4, replica_groups={}
}
"""
    assert collectives(text, 8) == (
        Collective("all-reduce", 2, 2 * 7 / 8 * (16 + 8 + 48)),
        Collective("all-gather", 6, 5 * 3 / 4 * 64 + 7 / 8 * 192),
        Collective("reduce-scatter", 5, 5 * 1 / 2 * 64),
        Collective("all-to-all", 3, 3 * 7 / 8 * 32),
        Collective("collective-permute", 5, 5 * 32),
    )


def test_changes_are_those_that_the_run_leaves_room_for():
    run = config(model=replace(SMALL, remat="dots"), loss_chunk=512)
    found = changes(run, jax.devices()[:1] * 4)
    words = {kind: [step[0] for step in steps] for kind, steps in found.items()}
    assert words == {
        "remat": ["--model.remat full"],
        "accumulation": ["--accumulation 4"],
        "mesh": ["--mesh.fsdp 2", "--mesh.fsdp 4"],
        "loss chunks": ["--loss-chunk 128"],
        "batch": ["--data.batch-size 8"],
    }


def test_changes_can_be_typed_and_bring_every_batch_down():
    run = config(mesh=MeshConfig(data=4), data=DataConfig(batch_size=24, sequence_length=128))
    found = changes(run, jax.devices()[:1] * 4)
    assert [step[0] for step in found["mesh"]] == [
        "--mesh.data -1 --mesh.fsdp 2", "--mesh.data -1 --mesh.fsdp 4",
    ]  # fmt: skip
    assert [step[0] for step in found["batch"]] == ["--data.batch-size 16", "--data.batch-size 8"]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 B"), (1.0, "1 B"), (999.4, "999 B"), (999.6, "1 kB"), (1234.0, "1.23 kB"),
     (2.55e-6, "2.55 uB"), (0.0995, "99.5 mB"), (3.21e17, "321 PB"),
     (4.58e-9, "4.58 nB"), (999.9e12, "1 PB")],
)  # fmt: skip
def test_numbers_are_scaled_to_their_units(value, words):
    assert scaled(value, "B") == words


def test_every_chip_is_found_by_its_kind_and_longer_names_come_first():
    for each in CHIPS:
        assert chip(f"{each.kind} x") == each
    assert chip("cpu") is None


@needs_compiler
def test_the_command_says_whether_it_fits_in_words_and_json(capsys, monkeypatch):
    path = str(Path(__file__).parents[2] / "configs" / "debug.py")
    with pytest.raises(SystemExit, match="0"):
        main(["plan", path, "--topology", "v5e:2x2", "--quick"])
    words = capsys.readouterr().out
    assert "v5e:2x2: 4 x TPU v5 lite, mesh data 4" in words
    assert re.search(r"total +\d+\.\d\n +capacity +16,128\.0\n +it fits\n", words)
    assert re.search(r"all-reduce +\d+ +\d+ kB\n", words)
    assert re.search(r"\n +memory +[\d.]+ us +arguments .* at 819 GB/s\n", words)
    assert " 0 s" not in words
    with pytest.raises(SystemExit, match="1"):
        main(["plan", path, "--topology", "v5e:1x1", "--quick", "--json", "--loss-chunk", "None",
              "--model.vocab-size", "400000", "--data.batch-size", "1", "--model.remat", "full",
              "--data.sequence-length", "32768"])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["memory"] is None
    assert "Ran out of memory" in found["refusal"]

    (way,) = found["ways_to_fit"]
    assert way["options"] == "--loss-chunk 512"
    assert way["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["configs/debug.py", "--topology", "v5e:9x9"], "there is no slice 'v5e:9x9'"),
     (["configs/debug.py", "--topology", "v5p:4x4x996"], "up to 6,144 chips"),
     (["configs/none.py", "--topology", "v5e:2x2"], "there is no config configs/none.py"),
     (["README.md", "--topology", "v5e:2x2"], "is no Python file; usage: jaxslm plan CONFIG.py"),
     (["--topology", "v5e:2x2"], "the config comes first"),
     (["configs/debug.py", "--topology", "v5e:2x2", "--decode", "--rows", "0"],
      "--rows must be 1 or more"),
     (["configs/debug.py", "--topology", "v5e:2x2", "--rows", "2"], "--rows is of --decode"),
     (["configs/debug.py", "--topology", "v5e:2x2", "--decode", "--largest-batch"],
      "--largest-batch is of training")],
)  # fmt: skip
def test_bad_requests_are_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *arguments])
    assert words in capsys.readouterr().err


def test_without_the_compiler_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("train.topology.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "configs/debug.py", "--topology", "v5e:2x2"])
    assert "this needs libtpu: pip install 'jaxslm[plan]'" in capsys.readouterr().err


def test_ripple_windows_end_the_cache():
    from jaxslm.decoding import most_slots

    assert most_slots(RippleConfig(attention_window=64), 4096) == 127
    assert most_slots(LumenConfig(), 4096) == 1024
