"""Log-probabilities under a large vocabulary have the values and gradients of plain autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raysvc.actors.model import head_logprobs as under_test
from raysvc.actors.model import token_model
from raysvc.actors.model.head_logprobs import head_logprobs
from raysvc.actors.model.load_model import tiny_model
from raysvc.actors.model.token_model import TokenModel
from raysvc.actors.worker.losses import PolicyLoss, SftLoss


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the threads of torch for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_each_thread_takes_a_share_of_the_entries_and_computes_alone(
    count: int, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "ENTRIES", 100)
    threads(count)

    def work(share: slice) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        return torch.tensor([share.start, share.stop, threading.get_ident()])

    shares = torch.stack(under_test._of_shares(301, work))
    assert (int(shares[0, 0]), int(shares[-1, 1])) == (0, 301)
    assert torch.equal(shares[1:, 0], shares[:-1, 1])
    assert len(shares) == min(count, 4)  # no share is smaller than a tile, but the last
    assert (threading.get_ident() in shares[:, 2]) is (count == 1)
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == count


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("targets", [1, 15, 16, 50])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "autocast"])
def test_values_and_gradients_are_those_of_log_softmax_in_float32(
    targets: int,
    entropy: bool,
    low: bool,
    count: int,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads(count)
    monkeypatch.setattr(under_test, "TARGETS", 16)  # several tiles, the last ones short
    monkeypatch.setattr(under_test, "ENTRIES", 100)
    torch.manual_seed(targets)
    rows = torch.randn(targets, 8, requires_grad=True)
    weight = torch.randn(301, 8, requires_grad=True)
    labels = torch.randint(0, 301, (targets,))
    mix = torch.randn(2, targets)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        found, of_entropy = head_logprobs(rows, weight, labels, entropy)
    logs = (rows @ weight.T).log_softmax(1)
    wanted = logs.gather(1, labels[:, None]).squeeze(1)
    wanted_entropy = -(logs.exp() * logs).sum(1)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (found * mix[0]).sum(), (wanted * mix[0]).sum()
    if entropy:
        assert of_entropy is not None
        torch.testing.assert_close(of_entropy, wanted_entropy)
        ours, theirs = ours + (of_entropy * mix[1]).sum(), theirs + (wanted_entropy * mix[1]).sum()
    for one, other in zip(
        torch.autograd.grad(ours, (rows, weight)), torch.autograd.grad(theirs, (rows, weight)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [SftLoss(), PolicyLoss(entropy_coef=0.1)], ids=["sft", "policy"])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "autocast"])
def test_a_model_trains_alike_with_it_and_without(
    loss: SftLoss | PolicyLoss, low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = TokenModel(tiny_model(70_000).train())
    ids = torch.randint(0, 70_000, (2, 9))
    labels = torch.where(torch.arange(9) < 3, -100, ids)
    places = torch.arange(9).expand(2, 9)
    inputs = {"input_ids": ids, "position_ids": places, "attention_mask": torch.ones_like(ids)}
    columns = {"advantages": torch.randn(2, 9), "old_logprobs": torch.full((2, 9), -11.0)}
    results, calls = [], []
    tiles = under_test.head_logprobs
    monkeypatch.setattr(
        token_model, "head_logprobs", lambda *args: calls.append(len(results)) or tiles(*args)
    )
    for limit in (16 << 20, 1 << 40):
        monkeypatch.setitem(model.forward.__globals__["LOGIT_BYTES"], "cpu", limit)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            total, metrics = model(inputs, labels, torch.full((2, 9), 0.1), columns, loss)
        total.backward()
        results.append((total.detach(), metrics, {n: p.grad.clone() for n, p in model.named_parameters()}))
    near = {"rtol": 0.02, "atol": 2e-3} if low else {"rtol": 1e-4, "atol": 1e-5}  # seven bits of a bfloat16
    torch.testing.assert_close(results[0], results[1], **near)
    assert calls == [0]  # the first went through tiles, the second did not
