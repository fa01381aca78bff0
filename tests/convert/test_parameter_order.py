"""Which parameter a torch optimizer means: told by names, or by shapes where they tell it."""

import random

import pytest
import torch

from convert.counterparts import build
from convert.parameter_order import assign, deal, named_parameters
from convert.tables import TABLES
from tests.convert.checkpoints import config_of, said
from tests.golden.make_golden import build_original, load_originals

MODELS = ["lumen", "gpt", "ripple"]


def order_of(model, **fields):
    return named_parameters(TABLES[model], config_of(model, **fields))


def recipe_sorted(order):
    """Groups as early nanoGPT made them: by name."""
    return [sorted(key for key in order if len(order[key]) > 1),
            sorted(key for key in order if len(order[key]) == 1)]  # fmt: skip


def shapes_of(order, groups):
    return [[order[key] for key in keys] for keys in groups]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("side", ["counterpart", "original"])
def test_order_is_that_of_named_parameters(side, model, request):
    if side == "original":
        originals = load_originals(request.getfixturevalue("shared")("originals"))
        module = build_original(originals, model, said(model))
    else:
        module = build(config_of(model))
    expected = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    assert list(order_of(model).items()) == list(expected.items())


@pytest.mark.parametrize("model", MODELS)
def test_shapes_tell_the_groups_of_common_recipes(model):
    order = order_of(model)
    table = next(iter(order))
    of_rank = {rank: [key for key in order if len(order[key]) == rank] for rank in (1, 2)}
    for groups in (
        [list(order)],
        [of_rank[2], of_rank[1]],
        [of_rank[1], of_rank[2]],
        [[table], [key for key in of_rank[2] if key != table], of_rank[1]],
        [of_rank[2], [], of_rank[1]],
    ):
        assert deal(order, shapes_of(order, groups)) == groups


def test_parameters_without_moments_go_where_nothing_else_fits():
    order = order_of("ripple")
    decays = [key for key in order if key.endswith("decay_factor")]
    others = [key for key in order if key not in decays]
    shapes = [[None if key in decays else order[key] for key in order]]
    assert deal(order, shapes) == [list(order)]
    assert deal(order, [*shapes_of(order, [others]), [None] * len(decays)]) == [others, decays]


def test_random_groups_are_found_or_called_ambiguous():
    """Against a search through every way."""
    rng = random.Random(0)
    found = ambiguous = 0
    for _ in range(300):
        shapes = [rng.choice([(1,), (2,), (2, 2)]) for _ in range(rng.randrange(1, 7))]
        parameters = {f"p{i}": shape for i, shape in enumerate(shapes)}
        count = rng.randrange(1, 4)
        groups: list[list[str]] = [[] for _ in range(count)]
        for key in parameters:
            rng.choice(groups).append(key)
        known = shapes_of(parameters, groups)
        for one in known:
            for at in range(len(one)):
                if rng.random() < 0.1:
                    one[at] = None
        ways = every_way(list(parameters), parameters, known)
        assert groups in ways
        if len(ways) == 1:
            assert deal(parameters, known) == groups
            found += 1
        else:
            with pytest.raises(ValueError, match="shapes do not tell which parameter is which"):
                deal(parameters, known)
            ambiguous += 1
    assert min(found, ambiguous) > 50


def every_way(keys, parameters, groups) -> list[list[list[str]]]:
    if not keys:
        return [[[] for _ in groups]]
    ways = []
    for number, group in enumerate(groups):
        if group and group[0] in (None, parameters[keys[0]]):
            rest = [*groups[:number], group[1:], *groups[number + 1 :]]
            for way in every_way(keys[1:], parameters, rest):
                ways.append([*way[:number], [keys[0], *way[number]], *way[number + 1 :]])
    return ways


@pytest.mark.parametrize("model", MODELS)
def test_parameters_sorted_by_name_are_refused(model):
    order = order_of(model)
    with pytest.raises(ValueError, match="no group's next moments have the shape"):
        deal(order, shapes_of(order, recipe_sorted(order)))


def test_layers_in_groups_of_their_own_are_ambiguous():
    order = order_of("gpt")
    first = [key for key in order if ".h.0." in key]
    groups = [first, [key for key in order if key not in first]]
    words = r"transformer\.h\.\d\.mlp\.c_proj\.weight \[16, 64\] may be in group 0 or 1; save the"
    with pytest.raises(ValueError, match=words):
        deal(order, shapes_of(order, groups))


def test_too_many_ways_are_not_searched():
    order = {f"p{i}": (2,) for i in range(400)}
    with pytest.raises(ValueError, match="shapes do not tell"):
        deal(order, [[(2,)] * 40 for _ in range(10)])


# Names


def named(*groups, field="param_names"):
    """Torch's groups with names."""
    if field == "params":
        return [{"params": names} for names in groups]
    return [{"params": list(range(len(names))), field: names} for names in groups]


@pytest.mark.parametrize("field", ["param_names", "params"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_names_settle_what_shapes_do_not(prefix, field):
    order, table = order_of("gpt"), TABLES["gpt"]
    first = [key for key in order if ".h.0." in key]
    groups = [first, [key for key in order if key not in first]]
    given = named(*[[prefix + key for key in keys] for keys in groups], field=field)
    assert assign(given, shapes_of(order, groups), order, table) == groups


def test_tied_table_may_go_by_its_other_name():
    order, table = order_of("gpt"), TABLES["gpt"]
    keys = list(order)
    given = named(["lm_head.weight", *keys[1:]])
    assert assign(given, shapes_of(order, [keys]), order, table) == [keys]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda keys: [*keys[:-1], "head"], "the names in it are not the model's, each once: head"),
        (lambda keys: [*keys[:-1], keys[0]], r"not the model's, each once: transformer\.ln_f\.b"),
        (lambda keys: keys[:-1], "param_names is no list as long as params"),
        (lambda keys: None, "param_names is no list as long as params"),
        (lambda keys: [keys[0], keys[2], keys[1], *keys[3:]], "not in the order of named_param"),
        (lambda keys: [keys[1], keys[0], *keys[2:]], r"moments of .* have the shape \[31, 16\]"),
    ],
)
def test_names_that_do_not_fit_are_refused(change, words):
    order, table = order_of("gpt"), TABLES["gpt"]
    keys = list(order)
    given = [{"params": list(range(len(keys))), "param_names": change(list(keys))}]
    with pytest.raises(ValueError, match=words):
        assign(given, shapes_of(order, [keys]), order, table)


def test_number_of_parameters_must_be_the_models():
    order, table = order_of("gpt"), TABLES["gpt"]
    shapes = shapes_of(order, [list(order)])
    for wrong in ([shapes[0][:-1]], [[*shapes[0], (31, 16)]]):
        groups = [{"params": list(range(len(wrong[0])))}]
        with pytest.raises(ValueError, match=f"hold {len(wrong[0])} parameters, the model has 23"):
            assign(groups, wrong, order, table)


def test_torch_keeps_the_names_that_are_read():
    module = build(config_of("gpt"))
    groups = torch.optim.AdamW(module.named_parameters()).state_dict()["param_groups"]
    order = order_of("gpt")
    assert groups[0]["param_names"] == list(order)
    assert assign(groups, [[None] * len(order)], order, TABLES["gpt"]) == [list(order)]
