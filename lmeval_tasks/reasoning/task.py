"""The class behind the reasoning tasks: what their YAML files cannot say to lm-eval."""

from __future__ import annotations

import logging
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning import documents, prompts, sampling, scoring
from kvpolicy.lmeval_tasks.reasoning.options import Options

_log = logging.getLogger(__name__)


class ReasoningTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval has no types
    """An lm-eval task that reads its options from the metadata and asks each problem `repeats` times.

    Each sample is a request of its own, with a seed of its own among its generation settings. So neither the default
    filter, which takes the first response of a request, nor lm-eval's response cache makes one sample of several.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        config = {name: value for name, value in config.items() if name != "class"}
        self.options = Options.of(config.get("metadata") or {})
        if self.options.repeats is not None:
            config["repeats"] = self.options.repeats
        self._thinking = False
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Read the documents; called by lm-eval as it makes the task, and so before anything is generated.

        Raises
        ------
        TaskError
            If the documents cannot be read, or answers could not be graded here.
        """
        from datasets import Dataset, DatasetDict

        scoring.check_grading()
        given = dataset_kwargs or {}
        fields: dict[str, Any] = {
            name: value if isinstance(value, str) else tuple(value) for name, value in given.items()
        }
        split = self.config.test_split
        source = documents.Source(self.config.dataset_path, self.config.dataset_name, split, **fields)
        self.dataset = DatasetDict({split: Dataset.from_list(documents.load(source, self.options))})

    def build_all_requests(
        self, *, cache_requests: bool = False, chat_template: prompts.ChatTemplate | None = None, **keywords: Any
    ) -> None:
        """Build the requests, and refuse the run if lm-eval or SGLang would not follow its settings.

        Raises
        ------
        TaskError
            See :func:`sampling.check`, :func:`sampling.check_room` and :func:`prompts.with_thinking`.
        """
        if cache_requests:
            raise TaskError(
                "--cache_requests would mix the requests of different splits, seeds and repeats, which its key does "
                "not name; leave it out."
            )
        generation = self.config.generation_kwargs
        sampling.check(generation, self.config.repeats)
        if chat_template is None:
            _log.warning("%s without --apply_chat_template: chat and thinking models need it.", self.config.task)
        lm: Any = getattr(chat_template, "__self__", None)
        if self.options.enable_thinking is not None:
            chat_template = prompts.with_thinking(chat_template, self.options.enable_thinking)
        super().build_all_requests(chat_template=chat_template, **keywords)
        asked = {instance.arguments[0] for instance in self.instances}
        self._thinking = bool(self.options.enable_thinking) or any(map(prompts.opens_thinking, asked))
        if hasattr(lm, "max_length") and hasattr(lm, "tok_encode"):
            sampling.check_room(asked, generation["max_gen_toks"], lm.max_length, lambda text: len(lm.tok_encode(text)))
        elif limit := self._metadata.get("context_length") or self._metadata.get("max_model_len"):
            sampling.check_room(asked, generation["max_gen_toks"], int(limit), None)

    def construct_requests(self, doc: dict[str, Any], ctx: str, **keywords: Any) -> list[Instance]:
        """One request per sample. lm-eval would send one request `repeats` times, with the same seed."""
        name, number, repeats = keywords.pop("metadata")
        requests = []
        for repeat in range(repeats):
            request = super().construct_requests(doc, ctx, metadata=(name, number, 1), **keywords)
            context, generation = request.arguments
            request.arguments = (context, sampling.seeded(generation, self._metadata, doc["id"], repeat))
            request.idx = repeat
            requests.append(request)
        return requests

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        """Metrics of a document; `results` holds the text of each sample."""
        if callable(self.config.process_results):
            measured: dict[str, Any] = self.config.process_results(doc, results, thinking=self._thinking)
        else:  # --predict_only took it away
            measured = super().process_results(doc, results)
        return measured

    @property
    def _metadata(self) -> dict[str, Any]:
        return self.config.metadata or {}
