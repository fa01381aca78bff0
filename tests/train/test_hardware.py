"""What a token costs, counted by hand, and what a chip can do."""

import pytest

from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from train.hardware import flops_per_token, mean_keys, peak_flops


def test_lumen_preset_is_the_count_by_hand():
    """4 layers of width 256, 4 heads and 1 key-value head of 64, mlp 512; tied head of 2,048."""
    layer = 256 * 256 + 2 * 256 * 64 + 256 * 256 + 3 * 256 * 512
    factors = 4 * layer + 2048 * 256
    attention = 4 * 4 * 64 * (1024 + 1) / 2
    assert flops_per_token(LumenConfig(), 1024) == 6 * factors + 12 * attention


def test_gpt_preset_is_the_count_by_hand():
    """24 layers of width 1,024, 16 heads and 4 key-value heads of 64; tied head of 32,768."""
    layer = 1024 * 1024 + 2 * 1024 * 256 + 1024 * 1024 + 2 * 1024 * 4096
    factors = 24 * layer + 32768 * 1024
    attention = 24 * 16 * 64 * (2048 + 1) / 2
    assert flops_per_token(GPTConfig(), 2048) == 6 * factors + 12 * attention


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_ripple_preset_is_the_count_by_hand(absolute, bias):
    """6 layers of width 384, 6 heads of 64, no output projection; a head of its own of 65.

    Neither biases nor look-ups in the two tables are counted.
    """
    config = RippleConfig(use_absolute_pos_emb=absolute, bias=bias)
    layer = 3 * 384 * 384 + 384 * 2 * 512 + 512 * 384
    attention = 6 * 6 * 64 * (256 + 1) / 2
    assert flops_per_token(config, 256) == 6 * (6 * layer + 384 * 65) + 12 * attention


def test_window_lowers_the_cost():
    config = RippleConfig(attention_window=64)
    layer = 3 * 384 * 384 + 384 * 2 * 512 + 512 * 384
    keys = sum(i + 1 - max(0, i // 64 * 64 - 63) for i in range(256)) / 256
    found = flops_per_token(config, 256)
    assert found == pytest.approx(6 * (6 * layer + 384 * 65) + 12 * 6 * 6 * 64 * keys, rel=1e-12)
    assert found < flops_per_token(RippleConfig(), 256)


@pytest.mark.parametrize("mode", ["chunked", "exact"])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 7, 12, 13, 50])
@pytest.mark.parametrize("length", [1, 2, 12, 13])
def test_mean_keys_is_the_mean_over_every_pair(length, window, mode):
    def sees(query, key):
        if key > query or window is None or length <= window:
            return key <= query
        if mode == "exact":
            return query - key < window
        return key >= query // window * window - window + 1

    pairs = sum(sees(query, key) for query in range(length) for key in range(length))
    config = RippleConfig(attention_window=window, window_mode=mode)
    assert mean_keys(config, length) == pytest.approx(pairs / length, rel=1e-12)


def test_every_device_kind_finds_its_own_peak():
    """Names that JAX gives; a longer one goes before its beginning."""
    for kind, peak in {
        "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12,
        "TPU v5": 459e12, "TPU v6 lite": 918e12, "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12,
        "NVIDIA H100 NVL": 835e12, "NVIDIA H200 NVL": 836e12, "cpu": None, "TPU v3": None,
    }.items():  # fmt: skip
        assert peak_flops(kind) == peak, kind
