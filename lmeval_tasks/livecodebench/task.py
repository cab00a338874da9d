"""The class behind the task: reading the problems, and keeping their private tests for the grading."""

from __future__ import annotations

import logging
from typing import Any

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.livecodebench import problems
from kvpolicy.lmeval_tasks.reasoning.documents import chosen
from kvpolicy.lmeval_tasks.reasoning.task import ReasoningTask
from kvpolicy.lmeval_tasks.sandbox.choice import choose
from kvpolicy.lmeval_tasks.sandbox.outcome import SandboxError

_log = logging.getLogger(__name__)


class CodeTask(ReasoningTask):
    """A reasoning task whose answers are programs."""

    def download(self, dataset_kwargs: dict[str, str] | None = None, **_: Any) -> None:
        """Read the problems; called by lm-eval as it makes the task, and so before anything is generated.

        Raises
        ------
        TaskError
            If programs cannot be isolated here, or the problems cannot be read.
        """
        from datasets import Dataset, DatasetDict

        try:
            choose()
        except SandboxError as error:
            raise TaskError(str(error)) from error
        files = dataset_kwargs or {}
        documents, self._private, where = problems.load(self.config.dataset_path, files["hub_file"], files["file"])
        if not self._private:
            _log.warning("%s has public tests only: more programs pass than should.", where)
        self.dataset = DatasetDict({self.config.test_split: Dataset.from_list(chosen(documents, self.options, where))})

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        """Metrics of a problem; `results` holds the text of each sample."""
        return super().process_results(doc | {"private_test_cases": self._private.get(doc["id"])}, results)
