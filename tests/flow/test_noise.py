# SPDX-License-Identifier: Apache-2.0
"""Invariant: a noise value is a function of (seed, sample id, step, stream, element), and looks like white noise.

The integer generator is checked against the published vectors of Random123, the normals by their moments and
correlations (bounds of about five standard errors; the seeds are fixed, so the outcome is too). Not covered: equality
of the normals' last bits across devices.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from omni_engine.flow import INITIAL_LATENT, STEP_NOISE, philox_normal
from omni_engine.flow.noise import mix64, philox4x32, stream_key

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123 kat_vectors, philox 4x32, 10 rounds
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_is_the_published_generator(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = [torch.tensor([word]) for word in counter]
    low, high = (torch.tensor([word]) for word in key)
    produced = philox4x32((words[0], words[1], words[2], words[3]), (low, high))
    assert [int(word) for word in produced] == expected
    assert [int(word) for word in words] == counter  # inputs are left alone


def test_splitmix_finaliser_is_the_published_one() -> None:
    """First outputs of splitmix64 seeded with 1234567 (the state advances by the golden ratio)."""
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(3)]
    assert [mix64(state) for state in states] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_sample_gets_the_same_noise_in_every_batch() -> None:
    ids = torch.tensor([5, 0, 17, 1 << 40, 3])
    together = philox_normal(7, ids, 2, STEP_NOISE, 515)
    for row, sample in enumerate(ids.tolist()):
        assert torch.equal(philox_normal(7, torch.tensor([sample]), 2, STEP_NOISE, 515)[0], together[row])
    shuffled = torch.tensor([4, 2, 0, 1, 3])
    assert torch.equal(philox_normal(7, ids[shuffled], 2, STEP_NOISE, 515), together[shuffled])
    many = philox_normal(7, torch.arange(192), 2, STEP_NOISE, 515)
    assert torch.equal(many[[5, 0, 17, 3]], together[[0, 1, 2, 4]])


@pytest.mark.parametrize("elements", [0, 1, 2, 3, 4, 5, 63, 511])
def test_an_element_does_not_depend_on_how_many_follow(elements: int) -> None:
    ids = torch.arange(3)
    noise = philox_normal(7, ids, 2, STEP_NOISE, elements)
    assert noise.dtype == torch.float32 and noise.shape == (3, elements) and noise.is_contiguous()
    assert torch.equal(noise, philox_normal(7, ids, 2, STEP_NOISE, 512)[:, :elements])


def test_an_empty_batch_is_an_empty_result() -> None:
    assert philox_normal(7, torch.zeros(0, dtype=torch.int64), 2, STEP_NOISE, 16).shape == (0, 16)


def test_every_part_of_the_key_counts() -> None:
    base = philox_normal(7, torch.tensor([3]), 2, STEP_NOISE, 64)
    for seed, sample, step, stream in ((8, 3, 2, STEP_NOISE), (7, 4, 2, STEP_NOISE), (7, 3, 1, STEP_NOISE),
                                       (7, 3, 2, INITIAL_LATENT)):  # fmt: skip
        other = philox_normal(seed, torch.tensor([sample]), step, stream, 64)
        assert not (other == base).any()


def test_keys_do_not_collide() -> None:
    parts = itertools.product(range(3), range(2000), range(12), (INITIAL_LATENT, STEP_NOISE))
    keys = [stream_key(*part) for part in parts]
    assert len(set(keys)) == len(keys) == 144_000
    # Neighbours in sample, step and stream trade places if the parts are packed too tightly.
    assert len({stream_key(0, *part) for part in ((1 << 16, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1))}) == 4


def test_moments_are_those_of_a_standard_normal() -> None:
    noise = philox_normal(11, torch.arange(256), 0, INITIAL_LATENT, 4096).double().flatten()  # 2^20 values
    standard_error = noise.numel() ** -0.5
    assert noise.mean().abs() < 5 * standard_error
    assert (noise.square().mean() - 1).abs() < 5 * 2**0.5 * standard_error
    assert noise.pow(3).mean().abs() < 5 * 15**0.5 * standard_error
    assert (noise.pow(4).mean() - 3).abs() < 5 * 96**0.5 * standard_error
    assert 4.4 < noise.abs().max() < 6.5
    for quantile, share in ((-1.959964, 0.025), (-0.674490, 0.25), (0.0, 0.5), (0.674490, 0.75), (1.959964, 0.975)):
        assert abs(float((noise < quantile).double().mean()) - share) < 5 * 0.5 * standard_error


def test_normals_are_box_muller_of_the_words_rounded_at_every_stage() -> None:
    """numpy as the oracle; an element may differ only where float64 libraries straddle a float32 rounding boundary."""
    key, blocks = stream_key(3, 1, 2, STEP_NOISE), torch.arange(4096)
    zero = torch.zeros_like(blocks)
    words = philox4x32((blocks, zero, zero, zero), (torch.tensor([key % 2**32]), torch.tensor([key >> 32])))
    expected = np.empty((4096, 4), dtype=np.float32)
    for column, (first, second) in enumerate((words[:2], words[2:])):
        uniform = first.numpy().astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
        uniform = np.minimum(uniform, np.float32(0.99999994)).astype(np.float64)
        angle = second.numpy().astype(np.float32) * np.float32(2.0**-32) * np.float32(2 * np.pi)
        radius = np.sqrt((np.float32(-2) * np.log(uniform).astype(np.float32)).astype(np.float64)).astype(np.float32)
        expected[:, 2 * column] = radius * np.cos(angle.astype(np.float64)).astype(np.float32)
        expected[:, 2 * column + 1] = radius * np.sin(angle.astype(np.float64)).astype(np.float32)
    noise = philox_normal(3, torch.tensor([1]), 2, STEP_NOISE, 4 * 4096)[0].numpy()
    assert (noise != expected.ravel()).sum() <= 2
    np.testing.assert_allclose(noise, expected.ravel(), rtol=1e-6)


def test_samples_steps_streams_and_elements_are_uncorrelated() -> None:
    def noise(step: int, stream: int) -> torch.Tensor:
        return philox_normal(11, torch.arange(64), step, stream, 4096).double()

    base, elements = noise(0, INITIAL_LATENT), 4096
    rows = torch.corrcoef(torch.cat([base, noise(0, STEP_NOISE), noise(1, STEP_NOISE)]))
    assert (rows - torch.eye(len(rows))).abs().max() < 6 * elements**-0.5  # 18,336 pairs of 4,096 values
    for lag in (1, 2, 3, 4, 64):
        pair = base[:, lag:] * base[:, :-lag]
        assert pair.mean().abs() < 5 * pair.numel() ** -0.5
        squares = (base[:, lag:].square() - 1) * (base[:, :-lag].square() - 1)
        assert squares.mean().abs() < 5 * 2 * pair.numel() ** -0.5


@pytest.mark.parametrize("part", [(-1, 0, 0, 0), (1 << 64, 0, 0, 0), (0, -1, 0, 0), (0, 1 << 44, 0, 0),
                                  (0, 0, 1 << 16, 0), (0, 0, -1, 0), (0, 0, 0, 16)])  # fmt: skip
def test_keys_out_of_range_are_refused(part: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="noise key out of range"):
        stream_key(*part)


def test_ids_must_be_integers() -> None:
    with pytest.raises(TypeError, match="int64"):
        philox_normal(0, torch.arange(4).float(), 0, STEP_NOISE, 8)
