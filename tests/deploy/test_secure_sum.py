"""The masked sum: exact to its resolution, without information on single sites, and with clear errors."""

import numpy as np
import pytest

from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.secure_sum import MaskedSum, SecureSumError, digest

SITES = [0, 2, 3]  # of four; the second is absent
STAGE, CALL = Stage(1, 0), b"the digest of a call"


def arrays(seed, size=6):
    rng = np.random.default_rng(seed)
    return {"x.tree": rng.normal(size=(2, size)), "loss": np.asarray(rng.normal())}


def concealed(dealt, values, call=CALL):
    return {i: dealt[1][i].conceal(STAGE, call, SITES, values[i]) for i in SITES}


def test_the_sum_is_exact_to_its_resolution():
    dealt, values = MaskedSum.dealt(4, bits=30), {i: arrays(i) for i in SITES}
    found = dealt[0].reveal(STAGE, SITES, concealed(dealt, values))
    for name, total in found.items():
        expected = sum(values[i][name] for i in SITES)
        assert total.shape == expected.shape
        assert np.abs(total - expected).max() <= len(SITES) * 2.0**-31 * (1 + 1e-9)


def words(part):
    """Numbers in [0, 1) of what left a site."""
    return part["x.tree"].ravel() / 2.0**64


def test_what_leaves_a_site_looks_uniform_whatever_it_hides():
    size = 20_000
    same = {i: {"x.tree": np.full(size, 0.25), "loss": np.zeros(())} for i in SITES}
    one, other = MaskedSum.dealt(4), MaskedSum.dealt(4)
    seen = [words(concealed(one, same)[i]) for i in SITES]
    seen.append(words(concealed(other, same)[0]))  # other secrets
    seen.append(words(concealed(one, same, b"another exchange")[0]))
    counts = np.stack([np.histogram(s, bins=50, range=(0, 1))[0] for s in seen])
    chi = np.sum((counts - size / 50) ** 2 / (size / 50), axis=1)
    assert np.all(np.abs(chi - 49) < 6 * np.sqrt(2 * 49))
    # Two sites' masks have one secret in common and one that is not: uniform, and so uncorrelated.
    assert np.abs(np.corrcoef(seen) - np.eye(len(seen))).max() < 5 / np.sqrt(size)


def test_arrays_of_one_message_have_different_masks():
    twice = {i: {"a": np.zeros(4), "b": np.zeros(4)} for i in SITES}
    part = concealed(MaskedSum.dealt(4), twice)[0]
    assert not np.any(part["a"] == part["b"])


def test_a_missing_part_cannot_be_unmasked():
    dealt, values = MaskedSum.dealt(4), {i: arrays(i) for i in SITES}
    parts = concealed(dealt, values)
    del parts[2]
    with pytest.raises(SecureSumError, match=r"round 1, exchange 0: the parts of sites \[2\] are missing"):
        dealt[0].reveal(STAGE, SITES, parts)
    rest = dealt[0].reveal(STAGE, [0, 3], parts)["x.tree"]  # the sum of the others stays masked
    assert np.abs(rest - values[0]["x.tree"] - values[3]["x.tree"]).max() > 1e3


@pytest.mark.parametrize("value", [2.0**23 / 3, -(2.0**23) / 3, np.nan, np.inf])
def test_a_value_that_does_not_fit_is_refused_by_name(value):
    _, sites = MaskedSum.dealt(4, bits=40)
    sites[0].conceal(STAGE, b"fits", SITES, {"x.tree": np.array([2.0**23 / 3 * 0.999])})
    with pytest.raises(SecureSumError, match=r"site 0: x.tree has a weighted value"):
        sites[0].conceal(STAGE, CALL, SITES, {"x.tree": np.array([value])})


def test_a_mask_is_not_used_for_two_messages():
    _, sites = MaskedSum.dealt(4)
    first = sites[0].conceal(STAGE, CALL, SITES, arrays(0))
    again = sites[0].conceal(STAGE, CALL, SITES, arrays(0))
    np.testing.assert_array_equal(first["x.tree"], again["x.tree"])
    with pytest.raises(SecureSumError, match="twice"):
        sites[0].conceal(STAGE, CALL, SITES, arrays(1))


def test_a_site_needs_a_secret_with_every_peer():
    _, sites = MaskedSum.dealt(3)
    with pytest.raises(SecureSumError, match=r"no secret with \[7\]"):
        sites[0].conceal(STAGE, CALL, [0, 7], arrays(0))
    with pytest.raises(SecureSumError, match="is not one of"):
        sites[0].conceal(STAGE, CALL, [1, 2], arrays(0))
    with pytest.raises(ValueError, match="bits=61"):
        MaskedSum(bits=61)


def test_the_digest_is_the_same_for_all_sites_of_an_exchange_and_for_no_other():
    call = Message("run", STAGE, "Ulm", {"x": np.ones(2)}, Stage(0, 0), {"s": [0, 1]})
    assert digest(call) == digest(call._replace(site="Bonn", after=None))
    others = [{"run": "b"}, {"stage": Stage(1, 1)}, {"arrays": {"x": np.zeros(2)}}, {"pools": {"s": [1, 0]}}]
    assert len({digest(call._replace(**other)) for other in others} | {digest(call)}) == 5


def test_a_sum_of_one_site_would_reveal_it_and_is_refused():
    server, (site, *_) = MaskedSum.dealt(4)
    for peers in ([0], [0, 0]):
        with pytest.raises(
            SecureSumError, match=r"this sum has 1 sites, and at least 2 are needed.* use a larger cohort"
        ):
            site.conceal(STAGE, CALL, peers, arrays(0))
        with pytest.raises(SecureSumError, match="would reveal the value of a single site"):
            server.reveal(STAGE, peers, {0: {"x": np.ones(1, np.uint64)}})
    with pytest.raises(SecureSumError, match="this sum has 0 sites"):
        server.reveal(STAGE, [], {})
