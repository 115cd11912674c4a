"""*Server and model*: queue, steps, forward pass."""

from parts import GREEN, RED, YELLOW, Board, Chart, Query, Section, must_be_zero, process, quantiles, rates

S = 'job="tether-server", instance=~"$server"'

now = Section(
    "Now",
    [
        Chart("Ready", "short", "1 while the server takes requests.", [Query(f"min(tether_server_ready{{{S}}})", "ready")],
              now=True, thresholds=[(None, RED), (1, GREEN)]),
        Chart("Prompt tokens/s", "short", "Tokens of prompts that were run, a second.",
              [Query(f"sum(tether:server_prompt_tokens:rate1m{{{S}}})", "tokens/s")], now=True, decimals=0),
        Chart("Batch fill", "percentunit", "Share of the token budget that steps fill.",
              [Query(f"avg(tether:server_batch_fill:ratio1m{{{S}}})", "fill")], now=True),
        Chart("In the forward pass", "percentunit", "Share of time that the model computes.",
              [Query(f"avg(tether:server_forward:ratio1m{{{S}}})", "busy")], now=True),
        Chart("Queue", "short", "Prompts that wait for their first step.",
              [Query(f"sum(tether_server_queue_depth{{{S}}})", "waiting")], now=True),
        Chart("Token mismatches", "short", "Prompts that the model consumed other tokens for.",
              [Query(f"sum(tether_server_token_mismatches_total{{{S}}})", "mismatches")],
              now=True, thresholds=must_be_zero()),
    ],
)

requests = Section(
    "Requests",
    [
        Chart("Answered", "reqps", "Calls of /generate, by outcome.",
              [rates("tether_server_request_seconds_count", "outcome", S)], stacked=True),
        Chart("Request time", "s", "From a call's head to the end of its reply, of calls that were answered.",
              quantiles("tether_server_request_seconds", also=f'{S}, outcome="ok"')),
        Chart("In flight", "short", "Calls of /generate not yet answered.",
              [Query(f"sum(tether_server_requests_in_flight{{{S}}})", "in flight")]),
        Chart("Oldest in flight", "s", "Age of the oldest call in flight.",
              [Query(f"max(tether_server_oldest_request_seconds{{{S}}})", "oldest")]),
        Chart("Tokens", "short", "Prompt tokens run and tokens generated, a second.",
              [Query(f"sum(rate(tether_server_prompt_tokens_total{{{S}}}[$__rate_interval]))", "prompt"),
               Query(f"sum(rate(tether_server_generated_tokens_total{{{S}}}[$__rate_interval]))", "generated")]),
        Chart("Tokenizer time", "s", "To turn the text of a prompt into tokens.",
              quantiles("tether_server_tokenize_seconds", also=S)),
    ],
)

queue = Section(
    "Queue",
    [
        Chart("Queue depth", "short", "Prompts waiting for their first step, prompts being continued, and the most that may "
              "wait.",
              [Query(f"sum(tether_server_queue_depth{{{S}}})", "waiting"),
               Query(f"sum(tether_server_running{{{S}}})", "continued"),
               Query(f"sum(tether_server_max_queued_requests{{{S}}})", "most waiting")]),
        Chart("Wait", "s", "From a prompt's arrival to its first step.", quantiles("tether_server_queue_seconds", also=S)),
        Chart("Waiting for dump room", "short", "Calls that wait for room in the dump budget.",
              [Query(f"sum(tether_server_dump_budget_waiting{{{S}}})", "waiting")]),
    ],
)

model = Section(
    "Model",
    [
        Chart("Steps", "cps", "Forward passes, by outcome.", [rates("tether_server_steps_total", "outcome", S)]),
        Chart("Forward time", "s", "Seconds in the model, of a step.", quantiles("tether_server_forward_seconds", also=S)),
        Chart("Step time", "s", "Seconds of a whole step: the forward pass, and handing its results on.",
              quantiles("tether_server_step_seconds", also=S)),
        Chart("Tokens in a step", "short", "Beside the token budget of a step.",
              [*quantiles("tether_server_step_tokens", also=S),
               Query(f"max(tether_server_max_batch_tokens{{{S}}})", "--max-batch-tokens")]),
        Chart("Sequences in a step", "short", "How many requests share a forward pass.",
              quantiles("tether_server_step_sequences", also=S)),
        Chart("Busy", "percentunit", "Share of time in the forward pass, standing still for dump writers, and the share of "
              "the token budget that steps fill.",
              [Query(f"avg(tether:server_forward:ratio1m{{{S}}})", "forward pass"),
               Query(f"avg(rate(tether_server_write_stall_seconds_total{{{S}}}[$__rate_interval]))", "waiting for writers"),
               Query(f"avg(tether:server_batch_fill:ratio1m{{{S}}})", "batch fill")], maximum=1),
        Chart("Load time", "s", "Seconds the model took to load.",
              [Query(f"max(tether_server_load_seconds{{{S}}})", "load")], now=True,
              thresholds=[(None, GREEN), (600, YELLOW)]),
    ],
)

BOARD = Board(
    uid="tether-server",
    title="Tether: server and model",
    description="From the queue through the forward pass to the reply.",
    instances=[("server", "Server", "tether_server_build_info")],
    sections=[now, requests, queue, model, process("tether_server", S)],
)
