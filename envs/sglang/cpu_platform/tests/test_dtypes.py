from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_cpu_platform import dtypes


def _options(dtype: str, kv_cache_dtype: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(dtype=dtype, kv_cache_dtype=kv_cache_dtype, model_path="models/some")


@pytest.mark.parametrize("dtype", ["float32", "float16", "half"])
def test_the_dtypes_that_the_interpreter_computes_rightly_are_let_through(dtype: str) -> None:
    dtypes.refuse_bfloat16_options(_options(dtype))


@pytest.mark.parametrize(
    ("options", "named"),
    [(_options("bfloat16"), "--dtype bfloat16"), (_options("float32", "bfloat16"), "--kv-cache-dtype bfloat16")],
)
def test_bfloat16_is_refused_in_one_line_that_names_the_option_and_the_remedy(
    options: SimpleNamespace, named: str
) -> None:
    with pytest.raises(SystemExit, match=rf"^{named}: [^\n]*float32$"):
        dtypes.refuse_bfloat16_options(options)


def test_auto_is_what_the_checkpoint_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_checkpoint_dtype", lambda options: torch.float16)
    dtypes.refuse_bfloat16_options(_options("auto"))
    monkeypatch.setattr(dtypes, "_checkpoint_dtype", lambda options: torch.bfloat16)
    with pytest.raises(SystemExit, match=r"^--dtype auto means bfloat16 for models/some: [^\n]*--dtype float32$"):
        dtypes.refuse_bfloat16_options(_options("auto"))


def test_bfloat16_weights_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    dtypes.refuse_bfloat16_weights(model[0])
    with pytest.raises(ValueError, match=r"Sequential\.1\.weight is bfloat16"):
        dtypes.refuse_bfloat16_weights(model)
