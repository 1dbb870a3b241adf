"""barellm's models in the lm-evaluation-harness. `python -m barellm.cli.lm_eval` is the harness's own command, which knows
`--model barellm --model_args run=runs/default` then. Needs the package lm_eval (extra "lm-eval")."""

# pyright: reportMissingImports=false
import sys
from collections.abc import Iterable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from barellm.cli.checkpoints import Found, found
from barellm.cli.main import fail
from barellm.errors import UserError
from barellm.evaluation.scoring import Score, Scorer, Text, shape_for
from barellm.generation import decode, samplers
from barellm.generation.writing import Written, write

KNOWN = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}  # of a request's generation keywords
IGNORED = {"do_sample", "until", "max_gen_toks", "num_beams", "use_cache", "pad_token_id", "eos_token_id"}


@register_model("barellm")
class Barellm(TemplateLM):
    """`run`: a run, a checkpoint's folder. `batch_size` sequences are computed at once. Sampled answers use `seed`."""

    def __init__(
        self, run: str, device: str | None = None, dtype: str | None = None, weights: str | None = None, batch_size: int | str = 8,
        max_gen_toks: int = 256, seed: int = 1337, max_batch_size: int | None = None,
    ) -> None:  # fmt: skip
        """Find the checkpoint; programs are compiled per request, sized for the texts."""
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UserError(f"batch_size is {batch_size!r}, expected a number from 1 on")
        self.batch_size, self.max_gen_toks, self.seed = int(batch_size), int(max_gen_toks), int(seed)
        chosen = "auto" if device in (None, "cuda:0") else device  # the harness says cuda:0 where its user says nothing
        self.checkpoint: Found = found(run, device=chosen, dtype=dtype, weights=weights)
        self.vocabulary = self.checkpoint.tokenizer
        self.max_length = self.checkpoint.config.model.max_seq
        self._chats = False

    @property
    def eot_token_id(self) -> int:
        end = self.vocabulary.conventions.end
        return self.vocabulary.start if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """The id before a text that has nothing before it."""
        return self.vocabulary.start

    @property
    def tokenizer_name(self) -> str:
        return self.vocabulary.hash

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.vocabulary.conventions.templates.get("default", "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self._chats = True  # its texts have special tokens by name from here on
        return self.vocabulary.chat_text(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, with what stands before one in front, as transformers' tokenizers have it: unless `add_special_tokens`
        is false, for a continuation."""
        begin, ids = self.vocabulary.conventions.begin, self.vocabulary.encode(string, special=self._chats).tolist()
        return ids if begin is None or add_special_tokens is False or ids[:1] == [begin] else [begin, *ids]

    def _scores(self, texts: list[Text], disable_tqdm: bool) -> list[Score]:
        """Of all texts, by a machine that is planned for them."""
        batch, seq = shape_for(texts, tokens=self.batch_size * self.max_length, most_seq=self.max_length)
        with self.checkpoint.opened(positions=0, scoring=(batch, seq)) as compiled:
            scores = Scorer(compiled.session, batch=batch, seq=seq).run(texts)
        assert scores is not None
        return scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each continuation after its context; harness interface."""
        texts = {i: Text([*context, *end], len(end)) for i, (_, context, end) in enumerate(requests) if end}
        scores = dict(zip(texts, self._scores(list(texts.values()), disable_tqdm) if texts else [], strict=True))
        found = []
        for i, (words, _, _) in enumerate(requests):
            score = scores.get(i)
            answer = (0.0, True) if score is None else (-score.total, bool(score.greedy.all()))
            self.cache_hook.add_partial("loglikelihood", words, answer)
            found.append(answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in windows of the context length; harness interface."""
        texts: list[Text] = []
        owners: list[int] = []
        for i, (string,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(string), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, end in map(make_disjoint_window, windows):
                texts.append(Text([*context, *end], len(end)))
                owners.append(i)
        found = [0.0] * len(requests)
        for i, score in zip(owners, self._scores(texts, disable_tqdm) if texts else [], strict=True):
            found[i] -= score.total
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer requests, batching those with equal generation keywords; harness interface."""
        requested: list[tuple[str, dict[str, Any]]] = [request.args for request in requests]  # pyright: ignore[reportAssignmentType]
        groups: dict[str, list[int]] = {}
        for i, (_, keywords) in enumerate(requested):
            groups.setdefault(repr(keywords), []).append(i)
        answers_in_order = [""] * len(requests)
        for members in groups.values():
            answers = self._answers([requested[i][0] for i in members], requested[members[0]][1])
            for i, answer in zip(members, answers, strict=True):
                answers_in_order[i] = answer
                self.cache_hook.add_partial("generate_until", requests[i].args, answer)
        return answers_in_order

    def _answers(self, contexts: list[str], keywords: dict[str, Any]) -> Iterable[str]:
        """Generate answers with the harness's keywords. UserError for unsupported ones that would change the result."""
        requested: dict[str, Any] = dict(normalize_gen_kwargs(keywords, self.max_gen_toks))
        if unknown := sorted(requested.keys() - KNOWN - IGNORED):
            raise UserError(f"a task asks for {unknown[0]} in its generation_kwargs, which barellm does not have")
        if int(requested.get("num_beams") or 1) > 1:
            raise UserError(f"a task asks for num_beams {requested['num_beams']}, and barellm has no beam search, expected 1")
        count = requested["max_gen_toks"]
        if count >= self.max_length:
            raise UserError(f"a task asks for {count} tokens, the model has {self.max_length} positions")
        sampling = samplers.Sampling(
            temperature=float(requested.get("temperature", 0.0)), top_k=int(requested.get("top_k") or 0),
            top_p=float(requested.get("top_p") or 1.0), min_p=float(requested.get("min_p") or 0.0),
            repetition_penalty=float(requested.get("repetition_penalty") or 1.0), seed=self.seed,
        )  # fmt: skip
        room = self.max_length - count
        prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        positions = decode.cache_positions(max(map(len, prompts)) + count, self.max_length)
        rows = min(self.batch_size, len(prompts), decode.MOST_TOGETHER)
        answers: list[str] = []
        with self.checkpoint.opened(positions=positions, rows=rows) as compiled:
            decoder = decode.open_decoder(compiled.session, compiled.config.model, self.vocabulary, positions=positions)
            for first in range(0, len(prompts), rows):
                batch = prompts[first : first + rows]
                texts = [Written(self.vocabulary, stops=requested["until"]) for _ in batch]
                for _ in write(decoder, batch, texts, count=count, hows=[sampling] * len(batch)):
                    pass
                answers += [text.text for text in texts]
        return answers


def main() -> int:
    """The harness's command. A user's mistake is one line, as in barellm's own."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
