import argparse
import pickle
from types import SimpleNamespace

import pytest

from sglang_ddtree import options
from sglang_ddtree.options import OptionError, Options


def parse(*arguments):
    parser = argparse.ArgumentParser()
    options.add_to_parser(parser)
    return options.given(vars(parser.parse_args(arguments)))


def test_nothing_given_is_nothing():
    assert parse() is None
    assert options.of(SimpleNamespace()) == Options(budget=16, topk_cap=None)


def test_given_options_are_read_and_the_others_keep_their_defaults():
    assert parse("--speculative-ddtree-budget", "32") == Options(budget=32)
    assert parse("--speculative-ddtree-topk-cap=8", "--speculative-ddtree-allow-hybrid-unsafe") == Options(
        topk_cap=8, allow_hybrid_unsafe=True
    )


def test_the_cap_is_by_default_the_budget_and_cut_to_it():
    assert Options(budget=32).effective_cap == 32
    assert Options(budget=32, topk_cap=8).effective_cap == 8
    assert Options(budget=4, topk_cap=8).effective_cap == 4


@pytest.mark.parametrize("name", ["budget", "topk-cap"])
@pytest.mark.parametrize("value", ["0", "-3", "x"])
def test_the_command_line_refuses_a_number_below_one_and_names_the_option(name, value, capsys):
    with pytest.raises(SystemExit):
        parse(f"--speculative-ddtree-{name}={value}")
    said = capsys.readouterr().err
    assert f"--speculative-ddtree-{name}" in said
    assert value in said


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_keyword_arguments_are_checked_like_the_command_line(value):
    with pytest.raises(OptionError, match="--speculative-ddtree-budget"):
        options.given({"speculative_ddtree_budget": value})


def test_split_takes_ours_out_of_the_arguments_of_an_engine():
    rest, chosen = options.split({"model_path": "m", "speculative_ddtree_budget": 4})
    assert rest == {"model_path": "m"}
    assert chosen == Options(budget=4)


class Record:
    def __reduce__(self):  # as SGLang's record: fields anew, attributes carried over
        return (restore, (dict(self.__dict__),))


def restore(attributes):
    record = Record()
    record.__dict__.update(attributes)
    return record


def test_options_ride_on_the_record_into_child_processes():
    record = options.attach(Record(), Options(budget=7))
    assert options.of(pickle.loads(pickle.dumps(record))) == Options(budget=7)


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE"])
def test_options_of_another_algorithm_are_an_error(algorithm):
    record = options.attach(SimpleNamespace(), Options(budget=7))
    with pytest.raises(OptionError, match="--speculative-ddtree-budget needs --speculative-algorithm DDTREE"):
        options.require_algorithm(record, algorithm)
    options.require_algorithm(record, "ddtree")
    options.require_algorithm(SimpleNamespace(), algorithm)


def test_server_info_shows_resolved_options_of_a_ddtree_server_alone(monkeypatch):
    monkeypatch.delenv(options.START_ID_VARIABLE, raising=False)
    record = options.attach(SimpleNamespace(), Options(budget=4, topk_cap=9))
    shown = options.echoed(record, "DDTREE")
    assert shown["speculative_ddtree_budget"] == 4
    assert shown["speculative_ddtree_topk_cap"] == 4
    assert options.echoed(record, "DFLASH") == {}


def test_server_info_repeats_the_start_id_of_every_server(monkeypatch):
    monkeypatch.setenv(options.START_ID_VARIABLE, "abc")
    assert options.echoed(SimpleNamespace(), None) == {"ddtree_start_id": "abc"}
