"""YAML files of tasks on local JSONL files, for lm-eval; `fulldepth.evaluation.local_tasks` loads them."""
