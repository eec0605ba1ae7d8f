"""Configurations as flat keys."""

from __future__ import annotations

from lit_encoders.report.settings import compare, flatten


def test_callbacks_keep_their_keys_wherever_they_stand() -> None:
    one = {"callbacks": [{"class_path": "a.Stop"}, {"class_path": "a.Watch", "init_args": {"every": 3}}]}
    other = {"callbacks": [{"class_path": "a.Watch", "init_args": {"every": 4}}]}
    apart, equal = compare([flatten(one), flatten(other)])
    assert apart == ["callbacks.Stop", "callbacks.Watch.every"]
    assert equal == ["callbacks.Watch"]


def test_repeated_classes_and_named_items() -> None:
    twice = flatten({"callbacks": [{"class_path": "a.L2SP"}, {"class_path": "a.L2SP"}]})
    assert list(twice) == ["callbacks.L2SP", "callbacks.L2SP[2]"]
    assert flatten({"phases": [{"name": "detour", "steps": 3}]}) == {
        "phases.detour.name": "detour",
        "phases.detour.steps": "3",
    }


def test_the_folder_never_differs_and_the_model_comes_first() -> None:
    one = {"trainer": {"default_root_dir": "a", "devices": 1}, "model": {"size": 1}}
    other = {"trainer": {"default_root_dir": "b", "devices": 2}, "model": {"size": 2}}
    assert compare([flatten(one), flatten(other)]) == (["model.size", "trainer.devices"], [])


def test_arguments_called_like_a_class_stay() -> None:
    # Only a mapping with a class path has arguments of a class.
    assert flatten({"init_args": {"a": 1}}) == {"init_args.a": "1"}
    assert flatten({"empty": {}, "none": []}) == {"empty": "{}", "none": "[]"}
