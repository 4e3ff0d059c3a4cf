"""Every name that says why something was not trained, not continued or not taken to the letter.

Invariant: a name that this package writes is here, with what it means and what one does about it, and stands nowhere
else in code. Names and their written forms are what is on disk, so they never change; a name that others wrote, in
files for NeMo Gym say, is data and is shown as it stands.

Flow: code takes a member (`MaskReason.NO_CALLS`) -> `join_reason` writes what it is about behind it -> reports count by
`reason_name` -> `gym-capture explain` and docs/reasons.md, which `make reasons-table` writes, say the rest.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple, Self

__all__ = [
    "KINDS",
    "UNRESOLVED",
    "AttemptFailure",
    "AuditReason",
    "CaptureMark",
    "ExcludedReason",
    "Kind",
    "LeftOutReason",
    "MaskReason",
    "NotRescoredReason",
    "NotSplicedReason",
    "ProblemReason",
    "Reason",
    "RequestRule",
    "TemplateRule",
    "UnresolvedReason",
    "join_reason",
    "lineage_mark",
    "reason_name",
    "split_reason",
]

_SEPARATOR: Final = ":"


class Reason(StrEnum):
    """A name with its two sentences. Text in every way: compared, hashed, shown and pickled as its plain name."""

    means: str
    what_to_do: str

    def __new__(cls, name: str, means: str, what_to_do: str = "Nothing.") -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.means = means
        member.what_to_do = what_to_do
        return member

    # The id of a snapshot is made of what is printed of its problems, be they fresh or read back as text.
    __repr__ = str.__repr__

    def __reduce_ex__(self, protocol: object) -> tuple[type[str], tuple[str]]:
        return str, (self.value,)


class CaptureMark(Reason):
    """Something that the capture of a rollout lacks."""

    DANGLING_INTENT = (
        "dangling_intent",
        "A call was begun, and there was neither a record of it nor a word that it was refused: it was lost, or still "
        "under way.",
        "Did the agent end, or give up, while a call was under way? That call is lost to a build at that moment: have "
        "the agent wait for its calls, or build again. Else a replica died or was killed: play the rollout again.",
    )
    CAPTURE_FAILED = (
        "capture_failed",
        "A reply was served whose record could not be made or written.",
        "The graph's log names the error and the call: a full disk, a lost state actor, or an engine that reported ids "
        "or log probabilities amiss. Mend that and play the rollout again.",
    )
    HANDED_ON = (
        "handed_on",
        "The attempt was cut, and a later one went on from its records, which are trained there.",
        "Nothing: build the later attempt. Its job closes this one when it is over.",
    )
    LINEAGE_CONFLICTING_CALL_ID = (
        "lineage_conflicting_call_id",
        "A record is durable, and lineage already has another one of the same call.",
        "Nothing of this graph sends a call twice: look for a second writer of the same records.",
    )
    LINEAGE_DIGEST_MISMATCH = (
        "lineage_digest_mismatch",
        "A record is durable, and its digest is not that of its ids.",
        "The record was changed on its way from engine to state: look for failing memory, and play the rollout again.",
    )
    LINEAGE_PARENT_MISSING = (
        "lineage_parent_missing",
        "A record is durable that was stored without its parent's ids, and lineage does not know the parent.",
        "With a store of your own, run `gym-capture conformance` on it: it lost a record. Else report it.",
    )
    LINEAGE_PARENT_LENGTH = (
        "lineage_parent_length",
        "A record is durable that was stored without its parent's ids, and the parent has another length than it says.",
        "With a store of your own, run `gym-capture conformance` on it: it mixes records up. Else report it.",
    )


class ProblemReason(Reason):
    """A fault in the records of a rollout: `RecordProblem.reason`."""

    MALFORMED_RECORD = (
        "malformed_record",
        "A record is not well-formed, or contradicts itself; the field says where.",
        "`gym-capture inspect` names line and field, as `details` of the build's report does. Mend the writer and play "
        "the rollout again.",
    )
    TRUNCATED_RECORD = (
        "truncated_record",
        "The last line of a token file was never finished: its writer died, or is still writing.",
        "Build when the rollout is over; if its writer died, play it again.",
    )
    NEWER_SCHEMA_VERSION = (
        "newer_schema_version",
        "A record in a token file has a newer schema version than this one reads.",
        "Upgrade gym-capture.",
    )
    CONFLICTING_CALL_ID = (
        "conflicting_call_id",
        "One call has several records that say different things.",
        "Give each call an id of its own, and let one writer write it. If a rollout is played again under its id, "
        "clear it first.",
    )
    DIGEST_MISMATCH = (
        "digest_mismatch",
        "The ids of a call are not those that its digest was taken of.",
        "The records were changed or damaged after they were written: get the original files, or play it again.",
    )
    INVALID_ROLLOUT_ID = (
        "invalid_rollout_id",
        "The files are of a rollout id that is not allowed.",
        "Use 1 to 128 of A-Z a-z 0-9 _ . - in rollout ids.",
    )
    CORRUPT_STATE = (
        "corrupt_state",
        "The file `.tokens.state.json` of the rollout is not what its writer makes.",
        "`gym-capture inspect` says why, as `details` of the build's report does. Export the rollout again, or get the "
        "original file.",
    )
    CORRUPT_LOG = (
        "corrupt_log",
        "A part of the log is damaged that holds, or may hold, a record of the rollout.",
        "`gym-capture records verify` says where. Check the disk, and play the rollout again.",
    )
    UNREADABLE = (
        "unreadable",
        "The rollout's records are there, and reading them failed.",
        "`gym-capture inspect` says what the system said, as `details` of the build's report does, e.g. a missing "
        "permission. Mend it, build again.",
    )
    BUILD_FAILED = (
        "build_failed",
        "Building the rollout raised an error that nobody expected of any record.",
        "`details` of the build's report has it. That is a bug: report it, with the records if you can.",
    )
    WORKER_DIED = (
        "worker_died",
        "Worker after worker died while it built this rollout, most likely for want of memory.",
        "Give workers more memory, or run fewer on a node (`--workers`, `--worker-cpus`), and build again.",
    )
    PARENT_MISSING = ("parent_missing", "Lineage says so of what is marked `lineage_parent_missing`.", "See there.")
    PARENT_LENGTH = ("parent_length", "Lineage says so of what is marked `lineage_parent_length`.", "See there.")


class MaskReason(Reason):
    """A build's objection to a rollout whose records can be read."""

    NO_CALLS = (
        "no_calls",
        "Nothing is recorded of the rollout.",
        "Check that the agent's base URL names this rollout id, and that records and rollouts are of the same job.",
    )
    ALL_SIDE_CALLS = (
        "all_side_calls",
        "Every call of the rollout is a side call.",
        "Check the patterns for side models (`--side-model`), and what model the agent asks for.",
    )
    NO_TRAINABLE_TOKENS = (
        "no_trainable_tokens",
        "There are calls, and none of their generated ids can be trained.",
        "`excluded_tokens` says why not; if it is empty, nothing was generated.",
    )
    UNRESOLVED_RETRIES = (
        "unresolved_retries",
        "A request was sent several times, and nothing shows which of the replies the agent went on with.",
        "Two identical requests count as tries of one. Have the agent send a request once, or go on from the reply.",
    )
    FOREIGN_RECORD = (
        "foreign_record",
        "A record of another rollout is among those of this one.",
        "Look at how the files were named or copied: each rollout has its own.",
    )
    ABSENT_PARENT = (
        "absent_parent",
        "A call names a parent of which there is no record.",
        "Records are missing: bring all of the rollout's files, or play it again.",
    )
    FOREIGN_PARENT = (
        "foreign_parent",
        "A call names a parent whose record is of another rollout.",
        "Look at how the files were named or copied: each rollout has its own.",
    )
    CONFLICTING_PARENT = (
        "conflicting_parent",
        "A call names a parent that has several records with different contents.",
        "Find the second writer of the parent, see `conflicting_call_id`.",
    )
    PARENT_CYCLE = (
        "parent_cycle",
        "Calls name each other as parents in a circle.",
        "The writer of these records is wrong: no call can continue itself.",
    )
    PARENT_MISMATCH = (
        "parent_mismatch",
        "A call's prompt does not start with the ids of the parent that it names.",
        "The server that wrote it rendered the conversation again, and other ids came out: `gym-capture inspect` shows "
        "where they part. Have it continue from the parent's ids, as this graph does, which checks that first.",
    )
    AMBIGUOUS_PARENT = (
        "ambiguous_parent",
        "A call names no parent, and its prompt starts with the ids of several that could be.",
        "Use a writer that records parents, as this graph does.",
    )
    OUT_OF_VOCABULARY = (
        "out_of_vocabulary",
        "An id is not below the size of the vocabulary that the build was given.",
        "Check `--vocab-size`, and that the records are of this model.",
    )
    MISALIGNED_ROWS = (
        "misaligned_rows",
        "Routed experts or a sampling mask do not have a row for each id.",
        "The engine or its plugin reports too few rows: mend it, or record without them.",
    )
    UNEVEN_ROWS = (
        "uneven_rows",
        "Calls of one trajectory differ in routed experts or sampling mask: one has none, or of another shape.",
        "Record them for all calls or for none.",
    )
    MISSING_REWARD = (
        "missing_reward",
        "The rollout has no reward: the file of rollouts has none, or nobody completed it with one.",
        "Give it one in the file of rollouts, or by `POST /rollouts/{id}/complete`; then build again.",
    )
    REWARD_OF_UNKNOWN_CALL = (
        "reward_of_unknown_call",
        "The agent gave a reward to a call of which there is no record.",
        "Name calls in `call_rewards` by the `id` of their replies, and by nothing else.",
    )
    NON_FINITE_REWARD = ("non_finite_reward", "The reward is infinite or no number.", "Mend the scoring.")
    INCOMPLETE = (
        "incomplete",
        "The rollout did not come to its end; what follows the name says why.",
        "`gym-capture explain` knows the failures of this package's rollout jobs; others are the agent's own.",
    )


class ExcludedReason(Reason):
    """Why generated ids are trained nowhere, although the rollout need not be masked."""

    EMPTY_GENERATION = ("empty_generation", "The call generated nothing.")
    ABORTED = (
        "aborted",
        "The call was cut off: its client left, or its replica had to go. What it would have become is not known.",
        "If there are many, give clients longer timeouts, and replicas longer to drain.",
    )
    FAILED = ("failed", "The engine ended the call with an error.", "Look into the engine's log.")
    SIDE_CALL = (
        "side_call",
        "The call is no part of the task: a quota probe, a title, another model's errand.",
        "Nothing; if it is one of the task, look at the rules for side calls (`--side-model`, `--no-calibrate`).",
    )
    RETRY_ORPHAN = (
        "retry_orphan",
        "The same request was sent again, and the agent went on with another reply than this one.",
        "Nothing; if there are many, clients give up too early.",
    )
    NOT_MAIN_CHAIN = (
        "not_main_chain",
        "The call belongs to another chain than the one that generated most.",
        "Deliver all chains (`--delivery all_chains`) if sub-agents and earlier histories are to be trained, too.",
    )
    UNPLACED_PARENT = (
        "unplaced_parent",
        "The call continues one that has no proven place, so what was before it is not known.",
        "See what masks the rollout.",
    )
    LOST_TRY = ("lost_try", "A call was lost, and a retry of it was answered: nothing that the agent used is missing.")


class UnresolvedReason(Reason):
    """Why no parent was found for a request that echoes assistant turns: a call begins a chain of its own."""

    UNKNOWN_ROLLOUT = (
        "unknown_rollout",
        "The request echoes assistant turns, and no call of its rollout is recorded.",
        "Nothing, if the agent begins with examples. Else send all its calls to one rollout id, and clear it before.",
    )
    AMBIGUOUS = (
        "ambiguous",
        "Several calls generated the turn that the request goes on from, with different ids.",
        "Have the agent send a request once: a retry whose first reply may have arrived leaves two.",
    )
    NO_MATCH = (
        "no_match",
        "No recorded call generated any of the turns that the request echoes, after what stands before them.",
        "Look whether the agent edits or compacts its history, changes its tools, or echoes another model.",
    )
    REWRITTEN_TURN = (
        "rewritten_turn",
        "A call was asked for a turn right there, and generated another than the one that the request echoes.",
        "The client rewrites what the policy said: docs/clients.md says what is forgiven and what clients do.",
    )
    NOT_SAID = ("not_said", "A file for NeMo Gym says that the parent is unresolved, and not why.", "Ask its writer.")


class NotSplicedReason(Reason):
    """Why a parent that was found was not continued: the whole conversation was rendered, as any server would."""

    TEMPLATE_REFUSES = (
        "template_refuses",
        "The chat template raises an error on the conversation with marks in it.",
        "`gym-capture audit-template` shows which shapes of turns it refuses; another template of the model may do.",
    )
    TURN_LOST = (
        "turn_lost",
        "The chat template does not write the parent's turn, or only a part of it.",
        "See `gym-capture audit-template`; a template for training writes what was said.",
    )
    TURN_REPEATED = (
        "turn_repeated",
        "The chat template writes the parent's turn more than once.",
        "See `gym-capture audit-template`; use another template.",
    )
    NEW_ITEM_LOST = (
        "new_item_lost",
        "The chat template does not write a message or a tool result that came after the parent's turn.",
        "See `gym-capture audit-template`; use a template that writes tool results.",
    )
    NEW_ITEM_MOVED = (
        "new_item_moved",
        "The chat template writes something that came after the parent's turn before it.",
        "Have the agent send no system messages later on, or use a template that leaves them where they stand.",
    )
    OLD_ITEM_MOVED = (
        "old_item_moved",
        "The chat template writes something that came before the parent's turn, or the tools, after it.",
        "Use a template that does not move the tools or the first messages to the end.",
    )
    CLOSE_UNKNOWN = (
        "close_unknown",
        "The parent's ids end in a way that cannot be matched with how the template closes a turn.",
        "Check that the engine's stop tokens are those of the template.",
    )
    TAIL_DIFFERS = (
        "tail_differs",
        "With marks in the texts the template writes something else after the turn than without.",
        "The template looks into texts: use one that does not.",
    )
    PREFIX_SUPPLY_OFF = (
        "prefix_supply_off",
        "The graph does not supply prefixes.",
        "Set `prefix_supply: true`, unless you compare.",
    )
    PREFIX_NOT_KEPT_BY_ENGINE = (
        "prefix_not_kept_by_engine",
        "The engine was given the parent's ids, and the prompt that it reports does not start with them.",
        "Look for an engine setting or a plugin that truncates or rewrites prompts.",
    )


class AuditReason(Reason):
    """A finding of a dry run of the splice although it was not refused. A graph never gets to record it."""

    PREFIX_LOST = (
        "prefix_lost",
        "The spliced prompt does not start with the parent's ids.",
        "That is a bug of the splice: report it, with the template.",
    )
    NOT_EQUAL = (
        "not_equal",
        "The template writes the turn just as it was sampled, and the spliced prompt is not the rendered one.",
        "That is a hole of the splice: report it, with the template.",
    )


class TemplateRule(Reason):
    """How a message is written that the chat template has no place for."""

    DEVELOPER_AS_SYSTEM = ("developer_as_system", "A developer message is written as a system message.")
    SYSTEM_JOINED = (
        "system_joined",
        "The messages that begin a conversation are written as one, a blank line between.",
    )
    SYSTEM_IN_USER = (
        "system_in_user",
        "The system message is written as the beginning of the first user message, a blank line between them; if the "
        "user does not come first, as a user message.",
    )
    LATE_SYSTEM_AS_USER = (
        "late_system_as_user",
        "A later system message is written as a user message where it stands.",
    )
    LATE_SYSTEM_IN_USER = (
        "late_system_in_user",
        "A later system message is joined to the user message behind it, else before it, in its turn; else it is one.",
    )
    RESULTS_IN_CALL_ORDER = (
        "results_in_call_order",
        "Tool results are written in the order of the calls, not in which they came: the template has no ids to tell "
        "them apart by.",
    )


class RequestRule(Reason):
    """How else a request was not taken to the letter. Further names are those of a graph's own normalization rules."""

    BILLING_HEADER = ("billing_header", "Lineage left out Claude Code's billing line, another one in every request.")
    CURRENT_DATE = (
        "current_date",
        "Lineage left out the date of today in a system text: a rollout may run past midnight.",
        "Nothing; in a group, dates make first prompts differ: take them out if your trainer groups by prompt.",
    )
    STOP_STRING_PUT_BACK = (
        "stop_string_put_back",
        "The client put back the stop string that ended the parent's turn; the policy did sample it.",
    )
    CUT_CALL_LEFT_OUT = ("cut_call_left_out", "The client's turn lacks the call that the parent's limit cut.")
    CUT_CALL_CLOSED = (
        "cut_call_closed",
        "The client's turn closes the call that the parent's limit cut.",
    )
    TURNS_ADDED = ("turns_added", "The request has assistant turns behind its parent's that no call generated.")
    TOOL_LEFT_OUT = (
        "tool_left_out",
        "A tool that only its vendor's servers run was not offered to the policy; its type follows the name.",
        "Turn it off in the agent if the task needs it: nobody here can run it.",
    )


class AttemptFailure(Reason):
    """Why an attempt of a rollout job gave nothing to score."""

    CALL_TIMEOUT = (
        "call_timeout",
        "A model call did not end in the time that the harness gives it.",
        "Give it longer (`--call-timeout-s`), lower `--concurrency`, or add engines (docs/scaling.md).",
    )
    CONNECTION = ("connection", "A call could not connect, or lost its connection.", "Check `serve run` and the URL.")
    SERVER_ERROR = (
        "server_error",
        "The server answered that it cannot answer now (5xx, 408, 409, 429).",
        "It was tried again; look into the graph's log if that did not help.",
    )
    UNAUTHORIZED = ("unauthorized", "The server does not admit the calls: the job ends.", "Pass its `--secret-file`.")
    REFUSED = ("refused", "The server refused a request (4xx), e.g. as too long.", "`detail` has the server's words.")
    MALFORMED_REPLY = (
        "malformed_reply",
        "The reply was no completion.",
        "Check that the URL is a gym-capture graph's.",
    )
    NOT_CLEARED = (
        "not_cleared",
        "An earlier attempt could not be closed, or what is stale not be cleared on the server: it was not played.",
        "Check that the state actors run (`/healthz`).",
    )
    ENVIRONMENT_START = (
        "environment_start",
        "The environment could not be made or reset: it raised an error.",
        "`detail` says what and where.",
    )
    ENVIRONMENT_SCORE = (
        "environment_score",
        "The environment raised an error instead of scoring.",
        "`detail` says what and where.",
    )
    EXCEPTION = (
        "exception",
        "The agent, or a tool of its environment, raised an error.",
        "`detail` says what and where.",
    )
    ROLLOUT_TIMEOUT = (
        "rollout_timeout",
        "The rollout was not over in the time that the job gives it.",
        "Give it longer (`--rollout-timeout-s`), or find out what the agent waits for.",
    )
    COMMAND_FAILED = (
        "command_failed",
        "The agent's program could not be started, ended with an error, or wrote too much.",
        "`detail` has what it wrote last.",
    )
    COMMAND_TIMEOUT = (
        "command_timeout",
        "The agent's program was not over in the time that its harness gives it.",
        "Give it longer (`timeout_s` of the harness), or find out from `detail` what it waits for.",
    )
    NO_ANSWER = (
        "no_answer",
        "The agent ended well, but left no answer where its harness looks for it.",
        "See that a program writes to the file that it is told, and that its version is the one that the harness "
        "knows; or that a remote agent's output is not empty.",
    )
    AGENT_UNREACHABLE = (
        "agent_unreachable",
        "Three attempts to connect to the remote agent failed; it was asked nothing.",
        "Check that the service is up, and `url` of the harness.",
    )
    AGENT_TIMEOUT = (
        "agent_timeout",
        "The remote agent did not reply in the time that the harness gives it. It may have acted, so it was not asked "
        "again in this attempt.",
        "Give it longer (`call_timeout_s` of the harness), lower `concurrency`, or look into the service.",
    )
    AGENT_CONNECTION_LOST = (
        "agent_connection_lost",
        "The connection to the remote agent broke after it was asked. It may have acted, so it was not asked again in "
        "this attempt.",
        "Look into the service, and for what closes long requests between here and there.",
    )
    AGENT_UNAVAILABLE = (
        "agent_unavailable",
        "The remote agent answered that it cannot answer now (5xx, 408, 409, 429).",
        "`detail` has its words; lower `concurrency` if it is busy.",
    )
    AGENT_REFUSED = (
        "agent_refused",
        "The remote agent refused a request (4xx), or sent it elsewhere (3xx), which is not followed.",
        "`detail` has its words. Name the last address as `url`; its token stands in `secret_file`.",
    )
    AGENT_MALFORMED_REPLY = (
        "agent_malformed_reply",
        "The remote agent's reply is no Responses object, or beyond a limit.",
        "`detail` names the field; docs/harnesses.md says what a reply must be.",
    )
    AGENT_FAILED = (
        "agent_failed",
        "The remote agent replied that it failed (`error`, or status `failed` or `cancelled`).",
        "`detail` has its words; look into the service.",
    )
    NODE_LOST = (
        "node_lost",
        "The process that played the attempt is gone: with its node, or killed, e.g. for want of memory.",
        "It was tried again elsewhere. If workers go often, have them play fewer rollouts (`ray.rollouts_per_worker`).",
    )
    GRAPH_LOST = (
        "graph_lost",
        "The attempt failed, and the graph did not answer then; `detail` begins with what the failure looked like.",
        "It was played again once the graph answered. Look into the graph's log for what ended it.",
    )
    BAD_REWARD = ("bad_reward", "The environment's reward is infinite or no number.", "Mend its scoring.")
    FAILED = ("failed", "The file of rollouts says that the rollout failed, and not why.", "Ask what wrote the file.")


class LeftOutReason(Reason):
    """Why a training step or an export left a whole rollout out."""

    MASKED = (
        "masked",
        "The rollout is masked.",
        "`gym-capture ui FOLDER` of the trajectories filters them by reason; `_report.json` there counts the reasons, "
        "and names rollouts of each for `gym-capture inspect` (`mask_examples`).",
    )
    TRUNCATED = (
        "truncated",
        "The rollout ended at a length limit, of a call or of the context, and the step leaves such rollouts out.",
        "Give the agent a higher limit, or train without overlong filtering.",
    )
    NO_ADVANTAGE = ("no_advantage", "The rollout has no advantage.", "Build with groups and rewards.")
    TOO_LONG = (
        "too_long",
        "A trajectory of the rollout is longer than the step takes, or than the model has positions for.",
        "Raise `--max-sequence-tokens`, or limit the agent's turns; nothing is cut to fit.",
    )
    GREEDY = (
        "greedy",
        "A call of the rollout was sampled at temperature 0: there is no distribution to take a gradient of.",
        "Pin `temperature` in the graph (`sampling_pin`).",
    )
    NO_SPREAD = (
        "no_spread",
        "All rollouts of its group have an advantage of 0, and the step leaves such groups out.",
        "Nothing, if they are few; else the tasks are too easy or too hard for the policy, or groups have one rollout.",
    )
    LOGPROB_MISMATCH = (
        "logprob_mismatch",
        "The trainer's log probabilities of one of its trajectories are too far from those it was sampled with.",
        "If it is most rollouts, the trainer has other weights, or assumes another distribution, than the engine had.",
    )
    NO_TRAINED_TOKENS = (
        "no_trained_tokens",
        "None of its tokens has a loss and a finite log probability.",
        "Look at the rollout's `excluded_tokens`.",
    )
    NO_REWARD = (
        "no_reward",
        "The rollout has no finite reward, and the trainer is to compare it.",
        "Build with rewards.",
    )


class NotRescoredReason(Reason):
    """Why recorded log probabilities were not compared with those of a model."""

    NO_WEIGHTS = (
        "no_weights",
        "There is no model folder of the version that sampled them.",
        "Name it: `--model VERSION=FOLDER`.",
    )
    SAMPLING_UNKNOWN = (
        "sampling_unknown",
        "It is not on record how they were sampled.",
        "Nothing; records of this version say it.",
    )
    PENALTIES = (
        "penalties",
        "They were sampled with penalties, which depend on more than the ids before them.",
        "Pin the penalties away in the graph (`sampling_pin`), for training too.",
    )
    NO_LOG_PROB = ("no_log_prob", "No log probability is known of one of them.", "Look into how they were recorded.")
    PROMPT_UNKNOWN = (
        "prompt_unknown",
        "The call's whole prompt is not known: the record of its parent is not there.",
        "`gym-capture records verify` says what is damaged.",
    )
    PAST_CONTEXT = (
        "past_context",
        "The engine's context has no room for them.",
        "Give the engine a larger `max_model_len` (`--engine-args`).",
    )


class TokenReason(Reason):
    """An id without loss where it is shown, of which its call does not say why; and what trajectories do not tell."""

    TRAINED_ELSEWHERE = (
        "trained_elsewhere",
        "Several chains share the generation, and another one of them trains it: each id is trained once.",
    )
    PLACE_NOT_TOLD = (
        "place_not_told",
        "A call without loss generated some of these ids, or may have; the others are prompt. A table of trajectories "
        "does not say which.",
        "Look at the records: a graph's `state.directory`, or `--records` with a job's directory.",
    )
    REASON_NOT_TOLD = (
        "reason_not_told",
        "The call has no loss in any trajectory, and a table of trajectories does not say which reason is its.",
        "`excluded_tokens` has the rollout's reasons; the records say which call has which: see `place_not_told`.",
    )


class Kind(NamedTuple):
    """Reasons that are found in one place."""

    key: str
    title: str
    where: str
    """Where a user meets them."""
    reasons: type[Reason]


UNRESOLVED: Final = "unresolved"
"""Written before an `UnresolvedReason` where outcomes are counted."""

KINDS: Final[tuple[Kind, ...]] = (
    Kind("capture", "Capture", "`mask_reasons`, `records list`, `/stats` (`incomplete`)", CaptureMark),
    Kind("records", "Records", "`mask_reasons`, `records list` (`problems`)", ProblemReason),
    Kind("mask", "Building", "`mask_reasons`; of calls that have no place also `excluded_tokens`", MaskReason),
    Kind("excluded", "Ids that are not trained", "`excluded_tokens`", ExcludedReason),
    Kind(UNRESOLVED, "Unresolved parents", "a record's `parent`, `/stats` (`resolutions`)", UnresolvedReason),
    Kind("not_spliced", "Parents that were not continued", "a record's `parent`, `audit-template`", NotSplicedReason),
    Kind("audit", "Holes of the splice", "`audit-template`", AuditReason),
    Kind("template_rule", "Rules for messages", "a record's `normalized`, `/stats` (`rules`)", TemplateRule),
    Kind("request_rule", "Rules for requests", "a record's `normalized`, `/stats` (`rules`)", RequestRule),
    Kind("attempt", "Failed attempts", "`rollouts.jsonl`, `mask_reasons` (behind `incomplete`)", AttemptFailure),
    Kind("left_out", "Rollouts that a step left out", "`train`, `train-step` (`left out`)", LeftOutReason),
    Kind("not_rescored", "Log probabilities that were not checked", "`verify-logprobs`", NotRescoredReason),
    Kind("token", "Tokens without a loss of their own", "`gym-capture ui`", TokenReason),
)


# --- as they are written ---------------------------------------------------------------------------------------------


def join_reason(name: str, *about: str | None) -> str:
    """A reason as it is written: its name, then what it is about, as far as that is known."""
    return _SEPARATOR.join(part for part in (name, *about) if part)


def split_reason(reason: str) -> tuple[str, str]:
    """The name, and what it is about: empty, or the rest, whatever is in it."""
    name, _, about = reason.partition(_SEPARATOR)
    return name, about


def reason_name(reason: str) -> str:
    """The name, by which reasons are counted: what they are about is of no end."""
    return split_reason(reason)[0]


def lineage_mark(problem: str, call_id: str) -> str:
    """The mark of a record that is durable and that the lineage index would not take, for the reason `problem`."""
    return join_reason(f"lineage_{problem}", call_id)
