"""*Proxy*: requests, the gate, upstreams."""

from parts import GREEN, RED, YELLOW, Board, Chart, Query, Section, must_be_zero, process, quantiles, rates

P = 'job="tether-proxy", instance=~"$proxy"'

now = Section(
    "Now",
    [
        Chart("Requests/s", "reqps", "Requests received a second.",
              [Query(f"sum(rate(tether_proxy_requests_received_total{{{P}}}[$__rate_interval]))", "requests")],
              now=True),
        Chart("In flight", "short", "Requests whose reply has not ended.",
              [Query(f"sum(tether_proxy_requests_in_flight{{{P}}})", "in flight")], now=True),
        Chart("Oldest in flight", "s", "Age of the oldest request in flight.",
              [Query(f"max(tether_proxy_oldest_request_seconds{{{P}}})", "oldest")],
              now=True, thresholds=[(None, GREEN), (600, YELLOW), (3600, RED)]),
        Chart("Errors", "percentunit", "Share of requests of the last five minutes that failed for a reason other than the "
              "client's own.", [Query(f"max(tether:proxy_errors:ratio5m{{{P}}})", "errors")],
              now=True, decimals=2, thresholds=[(None, GREEN), (0.01, YELLOW), (0.05, RED)]),
        Chart("Mismatches", "short", "Dumps that were missing or not their request's.",
              [Query(f"sum(tether_proxy_mismatches_total{{{P}}})", "mismatches")],
              now=True, thresholds=must_be_zero()),
        Chart("Upstreams up", "short", "Upstreams that can be reached.",
              [Query(f"sum(tether_proxy_upstream_up{{{P}}})", "up")],
              now=True, thresholds=[(None, RED), (1, GREEN)]),
    ],
)

requests = Section(
    "Requests",
    [
        Chart("Received", "reqps", "By route.", [rates("tether_proxy_requests_received_total", "route", P)],
              stacked=True),
        Chart("Answered", "reqps", "By the class of the status.",
              [rates("tether_proxy_requests_answered_total", "class", P)], stacked=True),
        Chart("Aborted", "reqps", "Requests that ended without their whole reply, by reason.",
              [rates("tether_proxy_requests_aborted_total", "reason", P)]),
        Chart("Request time", "s", "From the request's head to the reply's end, all routes.",
              quantiles("tether_proxy_request_duration_seconds", also=P)),
        Chart("Time to the reply's head", "s", "From sending a request upstream to the head of its reply.",
              quantiles("tether_proxy_upstream_first_byte_seconds", also=P)),
        Chart("In flight", "short", "Requests whose reply has not ended, those of them that wait for their turn, and client "
              "connections.",
              [Query(f"sum(tether_proxy_requests_in_flight{{{P}}})", "requests"),
               Query(f"sum(tether_proxy_requests_queued{{{P}}})", "queued"),
               Query(f"sum(tether_proxy_connections{{{P}}})", "connections")]),
        Chart("Oldest in flight", "s", "Age of the oldest request in flight. A straight rise is a request that hangs.",
              [Query(f"max(tether_proxy_oldest_request_seconds{{{P}}})", "oldest")]),
        Chart("Clients gone", "reqps", "Clients that went away before their reply's end, by how far the request had come.",
              [rates("tether_proxy_client_gone_total", "phase", P)]),
        Chart("Refused", "reqps", "Errors that the proxy answered with itself, by reason.",
              [rates("tether_proxy_refused_total", "reason", P)]),
    ],
)

gate = Section(
    "The gate",
    [
        Chart("Dumps looked at", "cps", "By result.", [rates("tether_proxy_gate_total", "result", P)]),
        Chart("Compared by", "cps", "Tokens where the request gives IDs, else the ID alone.",
              [rates("tether_proxy_gate_total", "checked", P)]),
        Chart("Wait for dumps", "s", "How long replies waited for their dumps.",
              quantiles("tether_proxy_gate_wait_seconds", also=P)),
        Chart("Mismatches", "short", "By reason. Must stay at zero.",
              [Query(f"sum by (reason) (tether_proxy_mismatches_total{{{P}}})", "{{reason}}")],
              thresholds=must_be_zero()),
        Chart("IDs given", "cps", "By where they came from.", [rates("tether_proxy_ids_total", "source", P)]),
        Chart("Undelivered replies", "short", "IDs whose dumps are deleted when they appear, and what became of them.",
              [Query(f"sum(tether_proxy_orphans_watched{{{P}}})", "watched"),
               Query(f"sum by (result) (tether_proxy_orphans_total{{{P}}})", "{{result}}")]),
    ],
)

upstreams = Section(
    "Upstreams",
    [
        Chart("Up", "short", "0 while an upstream fails its health checks, failed too often in a row, or "
              "lately refused a connection.",
              [Query(f"min by (upstream) (tether_proxy_upstream_up{{{P}}})", "{{upstream}}")], maximum=1),
        Chart("Health checks", "cps", "By result.", [rates("tether_proxy_upstream_health_checks_total", "result", P)]),
        Chart("Breaker opened", "short", "Times that an upstream failed so often in a row that requests were kept away.",
              [Query(f"sum by (upstream) (tether_proxy_upstream_breaker_opened_total{{{P}}})", "{{upstream}}")]),
        Chart("Requests by outcome", "reqps", "What upstreams made of requests.",
              [rates("tether_proxy_upstream_requests_total", "outcome", P)]),
        Chart("Load", "short", "Requests that each upstream holds.",
              [Query(f"sum by (upstream) (tether_proxy_upstream_requests_in_flight{{{P}}})", "{{upstream}}")]),
        Chart("Tokens held", "short", "Prompt tokens that each upstream holds; estimated where a request gives text.",
              [Query(f"sum by (upstream) (tether_proxy_upstream_tokens_in_flight{{{P}}})", "{{upstream}}")]),
        Chart("Retries", "reqps", "Requests sent once more because the first connection had not taken them.",
              [rates("tether_proxy_retries_total", "reason", P)]),
        Chart("Connections opened", "cps", "Connections opened to each upstream. Many mean that they are not kept.",
              [rates("tether_proxy_upstream_connections_opened_total", "upstream", P)]),
    ],
)

bodies = Section(
    "Bodies and connections",
    [
        Chart("Prompt tokens", "short", "Prompt tokens a second, of requests that give token IDs.",
              [Query(f"sum(rate(tether_proxy_prompt_tokens_total{{{P}}}[$__rate_interval]))", "tokens/s")]),
        Chart("Body size", "bytes", "Bytes of request bodies as sent upstream.",
              quantiles("tether_proxy_request_body_bytes", also=P)),
        Chart("Memory of bodies", "bytes", "Memory that request bodies hold, to be seen against --body-memory.",
              [Query(f"sum(tether_proxy_body_memory_bytes{{{P}}})", "held")]),
        Chart("Connections accepted", "cps", "Client connections accepted a second.",
              [Query(f"sum(rate(tether_proxy_connections_accepted_total{{{P}}}[$__rate_interval]))", "accepted")]),
        Chart("Draining", "short", "1 once a proxy was told to stop.",
              [Query(f"tether_proxy_draining{{{P}}}", "{{instance}}")], maximum=1),
    ],
)

BOARD = Board(
    uid="tether-proxy",
    title="Tether: proxy",
    description="Requests from head to reply, the gate that checks dumps, and the upstreams behind.",
    instances=[("proxy", "Proxy", "tether_proxy_build_info")],
    sections=[now, requests, gate, upstreams, bodies, process("tether_proxy", P)],
)
