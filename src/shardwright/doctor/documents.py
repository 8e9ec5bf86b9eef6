"""JSON, TOML and YAML documents as evidence, each taken for what its keys say it is."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.doctor.accelerate import is_accelerate, setting_of_accelerate
from shardwright.doctor.deepspeed import is_deepspeed, setting_of_deepspeed
from shardwright.doctor.evidence import Evidence, Message
from shardwright.doctor.finding import Source
from shardwright.doctor.flight import is_dump, read_dump
from shardwright.doctor.run_folder import is_failures, is_state, read_failures, read_ranks, read_state
from shardwright.doctor.setting import Setting, setting_of_plan
from shardwright.doctor.step_log import step_of_mapping
from shardwright.doctor.torchtitan import is_torchtitan, setting_of_torchtitan
from shardwright.doctor.trainer import is_trainer, setting_of_trainer
from shardwright.errors import EvidenceError, ShardwrightError
from shardwright.hf_config import model_from_config
from shardwright.planfile import Plan


def _add_dump(evidence: Evidence, name: str, document: Any) -> None:
    evidence.dumps.append(read_dump(name, document))


def _add_setting(
    read: Callable[[str, Any], Setting],
) -> Callable[[Evidence, str, Any], None]:
    return lambda evidence, name, document: evidence.settings.append(read(name, document))


def add_plan(evidence: Evidence, name: str, text: str) -> None:
    """A plan of ours; one that breaks its own rules is evidence too."""
    try:
        plan = Plan.from_toml(text, name)
    except ShardwrightError as fault:
        evidence.records.append(Message(Source(name, None, str(fault)), None, "bad_plan", {}))
        return
    evidence.plans.append((name, plan))
    evidence.settings.append(setting_of_plan(Source(name, None, plan.layout.label), plan))


def _add_model(evidence: Evidence, name: str, document: Any) -> None:
    try:
        evidence.models.append((name, model_from_config(document, Path(name).resolve().parent.name, name)))
    except ShardwrightError as fault:
        raise EvidenceError(f"is a model that cannot be read: {fault}") from None


def _add_history(evidence: Evidence, name: str, document: Any) -> None:
    """trainer_state.json of transformers, or a list of steps."""
    rows = document["log_history"] if isinstance(document, Mapping) else document
    for row in rows:
        if isinstance(row, Mapping):
            step = step_of_mapping(Source(name, None, json.dumps(row, default=str)[:400]), row)
            if step is not None:
                evidence.records.append(step)


def _add_run(evidence: Evidence, name: str, document: Any) -> None:
    evidence.runs.append(read_ranks(name, document))


def _add_records(read: Callable[[str, Any], Iterator[Any]]) -> Callable[[Evidence, str, Any], None]:
    def add(evidence: Evidence, name: str, document: Any) -> None:
        evidence.records += read(name, document)

    return add


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda document: isinstance(document, Mapping) and all(key in document for key in keys)


DOCUMENTS: list[tuple[Callable[[Any], bool], Callable[[Evidence, str, Any], None]]] = [
    (is_dump, _add_dump),
    (is_state, _add_records(read_state)),
    (is_failures, _add_records(read_failures)),
    (is_torchtitan, _add_setting(setting_of_torchtitan)),
    (is_deepspeed, _add_setting(setting_of_deepspeed)),
    (is_accelerate, _add_setting(setting_of_accelerate)),
    (is_trainer, _add_setting(setting_of_trainer)),
    (_has("model_type", "hidden_size"), _add_model),
    (_has("model_type", "n_embd"), _add_model),
    (_has("log_history"), _add_history),
    (lambda document: isinstance(document, list) and bool(document), _add_history),
    (_has("mesh", "ranks"), _add_run),
    (_has("losses", "layout", "steps"), _add_run),
]
"""What a JSON, TOML or YAML document may be, the first that matches."""
