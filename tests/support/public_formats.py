"""Rows as the most used public data sets have them, with what each is read as.

An entry is a name, the class of the data section, its options, one row, and the values that the
reader returns (columns of the recipe's keys) or a part of the refusal. Texts are shortened; columns
are complete enough to be mistaken for one another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.rated.config import ScoresDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.steps.config import StepsDataConfig


class Format(NamedTuple):
    """One public format, read by one job."""

    name: str
    kind: type[DataConfig]
    options: dict[str, Any]
    row: dict[str, Any]
    expected: dict[str, Any] | str


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def told(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def turns(*texts: str, names: tuple[str, str] = ("human", "gpt")) -> list[dict[str, Any]]:
    return [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]


SFT, RL, PAIRS, SCORE = SFTDataConfig, PromptDataConfig, PreferenceDataConfig, ResponseDataConfig
CHAT = {"apply_chat_template": True}
HI, HELLO = user("Hi"), says("Hello")
CONVERSATION = {"messages": [HI, HELLO]}
CALL = {"name": "weather", "arguments": {"city": "Lima"}}
TOOL = {"name": "weather", "description": "Weather of a city.", "parameters": {"type": "object"}}
HH = "\n\nHuman: Hi\n\nAssistant:"
BY_MESSAGES = {"chosen": [HI, HELLO], "rejected": [HI, says("No")]}
OF_MESSAGES = {"prompt": [HI], "chosen": [HELLO], "rejected": [says("No")]}

DEMONSTRATIONS = [
    Format("alpaca", SFT, CHAT, {"instruction": "Add.", "input": "1 and 2", "output": "3", "text":
           "Below is an instruction ... 3"}, "set form to columns or alpaca to choose one"),
    Format("alpaca", SFT, CHAT | {"form": "alpaca"}, {"instruction": "Add.", "input": "1 and 2",
           "output": "3", "text": "Below ..."}, {"prompt": "Add.\n\n1 and 2", "response": "3"}),
    Format("dolly", SFT, CHAT, {"instruction": "Who?", "context": "Ann.", "response": "Ann",
           "category": "closed_qa"}, {"prompt": "Who?\n\nAnn.", "response": "Ann"}),
    Format("oasst1 flattened", SFT, {}, {"text": "### Human: Hi### Assistant: Hello"},
           {"text": "### Human: Hi### Assistant: Hello"}),
    Format("sharegpt", SFT, {}, {"id": "a_0", "conversations": turns("Hi", "Hello")}, CONVERSATION),
    Format("sharegpt capitalized", SFT, {}, {"conversations": turns("Hi", "Hello", names=("Human",
           "GPT"))}, CONVERSATION),
    Format("sharegpt of Gemini", SFT, {}, {"conversations": turns("Hi", "Hello", names=("user",
           "model"))}, CONVERSATION),
    Format("ultrachat", SFT, {}, {"prompt": "Hi", "prompt_id": "f1"} | CONVERSATION, CONVERSATION),
    Format("openhermes", SFT, {}, {"source": "airoboros", "category": None, "system_prompt": None,
           "conversations": turns("Hi", "Hello")}, CONVERSATION),
    Format("slimorca", SFT, {}, {"conversations": [{"from": "system", "value": "Be kind.", "weight":
           None}, {"from": "human", "value": "Hi", "weight": 0.0}, {"from": "gpt", "value": "Hello",
           "weight": 1.0}]}, {"messages": [told("Be kind."), {**HI, "weight": 0.0},
           {**HELLO, "weight": 1.0}]}),
    Format("openorca", SFT, CHAT | {"prompt_key": "question"}, {"id": "niv.1", "system_prompt":
           "Be kind.", "question": "Hi", "response": "Hello"},
           {"question": "Hi", "response": "Hello", "system_prompt": "Be kind."}),
    Format("metamath", SFT, CHAT, {"type": "GSM_Rephrased", "query": "1+1?", "original_question":
           "1+1", "response": "2"}, "there is no column 'prompt'"),
    Format("metamath", SFT, CHAT | {"prompt_key": "query"}, {"type": "GSM_Rephrased", "query":
           "1+1?", "original_question": "1+1", "response": "2"}, {"query": "1+1?"}),
    Format("gsm8k", SFT, CHAT, {"question": "1+1?", "answer": "It is 2.\n#### 2"},
           {"prompt": "1+1?", "response": "It is 2.\n#### 2"}),
    Format("numina", SFT, {}, {"source": "aops", "problem": "1+1?", "solution": "2", "messages":
           [HI, HELLO]}, CONVERSATION),
    Format("openr1-math", SFT, {}, {"problem": "1+1?", "solution": "2", "answer": "2", "uuid": "1",
           "messages": [HI, HELLO]}, CONVERSATION),
    Format("open-thoughts", SFT, {}, {"system": "Be kind.", "conversations": turns("Hi", "Hello",
           names=("user", "assistant"))}, {"messages": [told("Be kind."), HI, HELLO]}),
    Format("s1k", SFT, CHAT, {"question": "1+1?", "solution": "2", "cot_type": "math",
           "gemini_attempt": "2"}, "nothing to learn from"),
    Format("s1k", SFT, CHAT | {"prompt_key": "question", "response_key": "gemini_attempt"},
           {"question": "1+1?", "solution": "2", "cot_type": "math", "gemini_attempt": "2"},
           {"question": "1+1?", "gemini_attempt": "2"}),
    Format("smoltalk", SFT, {}, CONVERSATION | {"source": "smol-magpie-ultra"}, CONVERSATION),
    Format("tulu-3 sft", SFT, {}, {"id": "t_1", "source": "ai2"} | CONVERSATION, CONVERSATION),
    Format("no_robots", SFT, {}, {"prompt": "Hi", "prompt_id": "1", "category": "Chat"}
           | CONVERSATION, CONVERSATION),
    Format("WildChat", SFT, {}, {"conversation_hash": "c", "model": "gpt-4", "turn": 1, "language":
           "English", "conversation": [HI, HELLO]}, CONVERSATION),
    Format("lmsys-chat", SFT, {}, {"conversation_id": "1", "model": "vicuna", "turn": 1,
           "conversation": [HI, HELLO], "redacted": False}, CONVERSATION),
    Format("OpenAI fine-tuning", SFT, {}, {"messages": [told("Be kind."), HI, {**HELLO, "weight":
           1}]}, {"messages": [told("Be kind."), HI, {**HELLO, "weight": 1}]}),
    Format("TRL prompt and completion", SFT, CHAT, {"prompt": "Hi", "completion": "Hello"},
           {"prompt": "Hi", "response": "Hello"}),
    Format("TRL conversational completion", SFT, {}, {"prompt": [HI], "completion": [HELLO]},
           {"prompt": [HI], "response": [HELLO]}),
    Format("API log", SFT, {}, {"request": {"model": "gpt-4o", "messages": [HI]}, "response":
           {"id": "r", "choices": [{"index": 0, "message": HELLO, "finish_reason": "stop"}]}},
           CONVERSATION),
    Format("API log as text", SFT, {}, {"request": '{"messages": [{"role": "user", "content": '
           '"Hi"}]}',
           "response": '{"choices": [{"message": {"role": "assistant", "content": "Hello"}}]}'},
           CONVERSATION),
    Format("API log of a failed call", SFT, {}, {"request": {"messages": [HI]}, "response":
           {"error": {"code": 429}}}, "no choices with a message.*on_bad_row: skip"),
    Format("nested keys", SFT, {"messages_key": "sample.turns.0"}, {"sample": {"turns": [[HI,
           HELLO]]}}, {"sample.turns.0": [HI, HELLO]}),
    Format("glaive function calling", SFT, {}, {"system": "SYSTEM: You ...", "chat":
           "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>"},
           "nothing to learn from.*turns as messages"),
    Format("glaive function calling as messages", SFT, {}, {"system": "You ..."} | CONVERSATION,
           CONVERSATION),
    Format("toolace", SFT, {}, {"system": "Be kind.", "conversations": turns("Hi", "Hello",
           names=("user", "assistant"))}, {"messages": [told("Be kind."), HI, HELLO]}),
    Format("APIGen-MT", SFT, {}, {"system": "Be kind.", "tools": [TOOL], "conversations": [
           {"from": "human", "value": "Hi"}, {"from": "function_call", "value":
           '{"name": "weather", "arguments": {"city": "Lima"}}'},
           {"from": "observation", "value": "20"}, {"from": "gpt", "value": "Hello"}]},
           {"messages": [told("Be kind."), HI, {"role": "assistant", "content": "", "tool_calls": [
               {"type": "function", "function": CALL}]}, {"role": "tool", "content": "20"},
               HELLO]}),
    Format("Capybara", SFT, {}, {"source": "x", "conversation": [{"input": "Hi", "output":
           "Hello"}]}, "nothing to learn from.*pair as two messages"),
    Format("Capybara as messages", SFT, {}, {"source": "x"} | CONVERSATION, CONVERSATION),
]  # fmt: skip

PROMPTS = [
    Format("gsm8k", RL, CHAT, {"question": "1+1?", "answer": "It is 2.\n#### 2"},
           {"prompt": "1+1?", "label": "2"}),
    Format("MATH", RL, CHAT, {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution":
           "\\boxed{2}"}, "prompt_key=prompt.*nearest: problem"),
    Format("MATH", RL, CHAT | {"prompt_key": "problem", "label_key": "solution"}, {"problem":
           "1+1?", "level": "Level 1", "type": "Algebra", "solution": "\\boxed{2}"},
           {"problem": "1+1?", "solution": "\\boxed{2}"}),
    Format("deepscaler", RL, CHAT | {"prompt_key": "problem", "label_key": "answer"}, {"problem":
           "1+1?", "answer": "2", "solution": "It is 2."}, {"problem": "1+1?", "answer": "2"}),
    Format("dapo-math (verl)", RL, {}, {"data_source": "math_dapo", "prompt": [HI], "ability":
           "MATH", "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
           "extra_info": {"index": "9"}}, {"prompt": [HI], "label": "34"}),
    Format("verl as text", RL, {}, {"prompt": [HI], "reward_model": '{"ground_truth": "34"}'},
           {"prompt": [HI], "label": "34"}),
    Format("verl by key", RL, {"label_key": "extra_info.answer"}, {"prompt": [HI], "extra_info":
           {"answer": "35"}}, {"prompt": [HI], "extra_info.answer": "35"}),
    Format("aime", RL, CHAT | {"prompt_key": "Problem", "label_key": "Answer"}, {"ID": "2024-I-1",
           "Problem": "1+1?", "Solution": "...", "Answer": 2}, {"Problem": "1+1?", "Answer": 2}),
    Format("reasoning-gym", RL, CHAT | {"prompt_key": "question", "label_key": "answer"},
           {"question": "1+1?", "answer": "2", "metadata": {"difficulty": {"n": 2}}},
           {"question": "1+1?", "answer": "2"}),
    Format("HumanEval", RL, CHAT | {"label_key": "test"}, {"task_id": "HumanEval/0", "prompt":
           "def f():", "canonical_solution": "  return 1", "test": "assert f() == 1", "entry_point":
           "f"}, {"prompt": "def f():", "test": "assert f() == 1"}),
    Format("MBPP", RL, CHAT | {"prompt_key": "text", "label_key": "test_list"}, {"task_id": 1,
           "text": "Write f.", "code": "def f(): ...", "test_list": ["assert f() == 1"]},
           {"text": "Write f.", "test_list": ["assert f() == 1"]}),
    Format("APPS and TACO", RL, CHAT | {"prompt_key": "question", "label_key": "input_output"},
           {"problem_id": 1, "question": "Write f.", "solutions": "[]", "input_output":
           '{"inputs": ["1"], "outputs": ["2"]}', "difficulty": "interview"},
           {"question": "Write f.", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}),
    Format("code contests", RL, CHAT | {"prompt_key": "description", "label_key": "public_tests"},
           {"name": "a", "description": "Add.", "public_tests": {"input": ["1"], "output": ["2"]}},
           {"description": "Add.", "public_tests": {"input": ["1"], "output": ["2"]}}),
    Format("xlam function calling", RL, CHAT | {"prompt_key": "query", "label_key": "answers"},
           {"id": 1, "query": "Hi", "answers": '[{"name": "weather"}]', "tools":
           '[{"name": "weather", "parameters": {}}]'},
           {"query": "Hi", "answers": '[{"name": "weather"}]'}),
    Format("ORZ", RL, CHAT | {"prompt_key": "0.value", "label_key": "1.ground_truth.value"},
           {"0": {"from": "human", "value": "1+1?"}, "1": {"from": "assistant", "ground_truth":
           {"value": "2"}}}, {"0.value": "1+1?", "1.ground_truth.value": "2"}),
    Format("ORZ", RL, CHAT, {"0": {"from": "human", "value": "1+1?"}, "1": {"from": "assistant"}},
           "no such column; its columns are 0, 1"),
    Format("messages", RL, {}, CONVERSATION, {"prompt": [HI], "label": "Hello"}),
    Format("API log", RL, {}, {"request": {"messages": [HI]}, "response": {"choices": [{"message":
           HELLO}]}}, {"prompt": [HI], "label": "Hello"}),
    Format("API log", SCORE, {}, {"request": {"messages": [HI]}, "response": {"choices":
           [{"message": HELLO}]}}, {"prompt": [HI], "response": "Hello"}),
    Format("TRL prompt and completion", SCORE, CHAT, {"prompt": "Hi", "completion": "Hello"},
           {"prompt": "Hi", "response": "Hello"}),
    Format("HelpSteer2", ScoresDataConfig, CHAT | {"kind": "scores"}, {"prompt": "Hi", "response":
           "Hello", "helpfulness": 4, "correctness": 4, "coherence": 4, "complexity": 1,
           "verbosity": 1}, {"prompt": "Hi", "response": "Hello"}),
    Format("Math-Shepherd of TRL", StepsDataConfig, {"kind": "steps"}, {"prompt": "1+1?",
           "completions": ["It is 2."], "labels": [True]}, {"prompt": "1+1?", "labels": [True]}),
]  # fmt: skip

PREFERENCES = [
    Format("hh-rlhf", PAIRS, {}, {"chosen": f"{HH} Hello", "rejected": f"{HH} No"},
           {"prompt": HH, "chosen": " Hello", "rejected": " No"}),
    Format("ultrafeedback binarized", PAIRS, CHAT, {"prompt": "Hi", "prompt_id": "1", "messages":
           [HI, HELLO], "score_chosen": 8.0, "score_rejected": 2.0} | BY_MESSAGES,
           {"prompt": "Hi"} | BY_MESSAGES),
    Format("orca_dpo_pairs", PAIRS, CHAT, {"system": "Be kind.", "question": "Hi", "chosen":
           "Hello", "rejected": "No"}, "prompt_key=prompt.*perhaps prompt_key=question"),
    Format("orca_dpo_pairs", PAIRS, CHAT | {"prompt_key": "question"}, {"system": "Be kind.",
           "question": "Hi", "chosen": "Hello", "rejected": "No"},
           {"system": "Be kind.", "question": "Hi", "chosen": "Hello", "rejected": "No"}),
    Format("skywork", PAIRS, {}, BY_MESSAGES | {"source": "magpie"}, OF_MESSAGES),
    Format("tulu-3 preferences", PAIRS, {}, {"id": "1", "prompt": "Hi"} | BY_MESSAGES,
           {"prompt": "Hi"} | BY_MESSAGES),
    Format("argilla dpo-mix and capybara", PAIRS, {}, {"dataset": "x", "chosen_rating": 5.0}
           | BY_MESSAGES, OF_MESSAGES),
    Format("OpenAI preferences", PAIRS, {"prompt_key": "input.messages", "chosen_key":
           "preferred_output", "rejected_key": "non_preferred_output"}, {"input":
           {"messages": [HI]},
           "preferred_output": [HELLO], "non_preferred_output": [says("No")]},
           {"input.messages": [HI], "preferred_output": [HELLO]}),
    Format("HelpSteer3", PAIRS, {}, {"domain": "general", "language": "english", "context": [HI],
           "response1": "No", "response2": "Hello", "overall_preference": 2},
           {"prompt": [HI], "chosen": "Hello", "rejected": "No"}),
    Format("HelpSteer3 tie", PAIRS, {}, {"context": [HI], "response1": "No", "response2": "Hello",
           "overall_preference": 0}, "no response is better.*on_bad_row: skip"),
    Format("HelpSteer2 preferences", PAIRS, CHAT, {"split": "train", "prompt": "Hi", "response_1":
           "Hello", "response_2": "No", "preference_strength": -2},
           {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}),
    Format("PKU-SafeRLHF", PAIRS, CHAT, {"prompt": "Hi", "response_0": "No", "response_1": "Hello",
           "is_response_0_safe": True, "better_response_id": 1, "safer_response_id": 0},
           {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}),
    Format("SHP", PAIRS, CHAT, {"post_id": "a", "history": "Hi", "human_ref_A": "Hello",
           "human_ref_B": "No", "labels": 1, "score_A": 9, "score_B": 2},
           {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}),
    Format("webgpt", PAIRS, CHAT, {"question": {"dataset": "eli5", "full_text": "Hi"}, "answer_0":
           "No", "answer_1": "Hello", "score_0": -0.5, "score_1": 0.5},
           {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}),
    Format("Chatbot Arena", PAIRS, {}, {"question_id": "1", "model_a": "x", "model_b": "y",
           "winner": "model_b", "conversation_a": [HI, says("No")], "conversation_b": [HI, HELLO]},
           OF_MESSAGES),
    Format("mt_bench_human_judgments, first answers", PAIRS, {}, {"question_id": 81, "model_a": "x",
           "model_b": "y", "winner": "model_b", "judge": "author_2", "turn": 1,
           "conversation_a": [HI, says("No"), HI, HELLO],
           "conversation_b": [HI, HELLO, HI, says("No")]}, OF_MESSAGES),
    Format("mt_bench_human_judgments, second answers", PAIRS, {}, {"winner": "model_a", "turn": 2,
           "conversation_a": [HI, HELLO, HI, HELLO], "conversation_b": [HI, HELLO, HI, says("No")]},
           {"prompt": [HI, HELLO, HI], "chosen": [HELLO], "rejected": [says("No")]}),
    Format("TRL kto-mix", PAIRS, {"label_key": "label"}, {"prompt": [HI], "completion": [HELLO],
           "label": True}, {"prompt": [HI], "response": [HELLO], "label": True}),
    Format("nectar", PAIRS, {}, {"prompt": f"{HH} ", "answers": [{"answer": "Hello", "rank": 1.0},
           {"answer": "No", "rank": 2.0}]}, "there is no column 'chosen'.*ranked answers"),
    Format("nectar as pairs", PAIRS, {}, {"prompt": f"{HH} ", "chosen": "Hello", "rejected": "No"},
           {"prompt": f"{HH} ", "chosen": "Hello"}),
]  # fmt: skip

FORMATS = [*DEMONSTRATIONS, *PROMPTS, *PREFERENCES]
