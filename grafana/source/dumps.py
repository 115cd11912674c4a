"""*Dumps and disk*: from the capture sink to the trainer's files."""

from parts import GREEN, RED, YELLOW, Board, Chart, Query, Section, quantiles, rates

S = 'job="tether-server", instance=~"$server"'
P = 'job="tether-proxy", instance=~"$proxy"'
E = 'job="tether-extract", instance=~"$extract"'

now = Section(
    "Now",
    [
        Chart("Dumps/s", "cps", "Dumps published a second.",
              [Query(f'sum(rate(tether_server_dumps_total{{{S}, outcome="published"}}[$__rate_interval]))', "dumps")],
              now=True),
        Chart("Bytes/s", "Bps", "Bytes of published dumps a second.",
              [Query(f"sum(rate(tether_server_dump_bytes_total{{{S}}}[$__rate_interval]))", "bytes")], now=True),
        Chart("Publish p99", "s", "99th percentile of the time to write and name a dump.",
              [Query(f"histogram_quantile(0.99, sum by (le) (rate(tether_server_publish_seconds_bucket{{{S}}}"
                     "[$__rate_interval])))", "p99")], now=True,
              thresholds=[(None, GREEN), (0.5, YELLOW), (1, RED)]),
        Chart("Waiting for a writer", "short", "Dumps whose states are computed and not on disk.",
              [Query(f"sum(tether_server_write_queue_dumps{{{S}}})", "dumps")], now=True),
        Chart("Budget used", "percentunit", "Share of --dump-budget that files and reservations take.",
              [Query(f"max((tether_server_dump_used_bytes{{{S}}} + tether_server_dump_reserved_bytes{{{S}}})"
                     f" / tether_server_dump_budget_bytes{{{S}}})", "used")], now=True, maximum=1,
              thresholds=[(None, GREEN), (0.8, YELLOW), (0.95, RED)]),
        Chart("Dump disk free", "bytes", "Bytes free on the dump directory's file system.",
              [Query(f"min(tether_server_dump_free_bytes{{{S}}})", "free")], now=True,
              thresholds=[(None, RED), (10e9, YELLOW), (100e9, GREEN)]),
    ],
)

writing = Section(
    "Writing dumps",
    [
        Chart("Dumps by outcome", "cps", "Captures whose states were computed.",
              [rates("tether_server_dumps_total", "outcome", S)]),
        Chart("Bytes", "Bps", "Bytes of published dumps a second.",
              [Query(f"sum(rate(tether_server_dump_bytes_total{{{S}}}[$__rate_interval]))", "published")]),
        Chart("Publish time", "s", "To write and name a dump.", quantiles("tether_server_publish_seconds", also=S)),
        Chart("Write queue", "short", "Dumps waiting for a writer or in one.",
              [Query(f"sum(tether_server_write_queue_dumps{{{S}}})", "dumps")]),
        Chart("Write queue in bytes", "bytes", "Their bytes, to be seen against --write-buffer.",
              [Query(f"sum(tether_server_write_queue_bytes{{{S}}})", "bytes")]),
        Chart("Model standing still", "percentunit", "Share of time that the engine waits for dump writers.",
              [Query(f"avg(rate(tether_server_write_stall_seconds_total{{{S}}}[$__rate_interval]))", "standing still")],
              thresholds=[(None, GREEN), (0.1, RED)], maximum=1),
    ],
)

directory = Section(
    "The dump directory",
    [
        Chart("Budget", "bytes", "Bytes of files, bytes reserved by requests under way, and the budget.",
              [Query(f"sum(tether_server_dump_used_bytes{{{S}}})", "files"),
               Query(f"sum(tether_server_dump_reserved_bytes{{{S}}})", "reserved"),
               Query(f"sum(tether_server_dump_budget_bytes{{{S}}})", "budget")]),
        Chart("Free", "bytes", "Bytes free on its file system.",
              [Query(f"min(tether_server_dump_free_bytes{{{S}}})", "free")]),
        Chart("Waiting for room", "short", "Calls that wait for room in the budget. Somebody must delete dumps.",
              [Query(f"sum(tether_server_dump_budget_waiting{{{S}}})", "waiting")]),
        Chart("Expired", "cps", "Dumps deleted for being older than --dump-ttl.",
              [Query(f"sum(rate(tether_server_dumps_expired_total{{{S}}}[$__rate_interval]))", "expired")]),
        Chart("Deleted by the proxy", "cps", "What became of dumps of replies that were not delivered.",
              [rates("tether_proxy_orphans_total", "result", P)]),
        Chart("The client's to delete", "short", "Dumps handed over to the extraction and not deleted yet, and those that "
              "could not be.",
              [Query(f"sum(tether_extract_ledger_dumps{{{E}}})", "to delete"),
               Query(f"sum(tether_extract_dumps_left_behind_total{{{E}}})", "left behind")]),
    ],
)

output = Section(
    "The trainer's files",
    [
        Chart("Output disk", "bytes", "Bytes free, and what the pending samples will take.",
              [Query(f"min(tether_extract_output_free_bytes{{{E}}})", "free"),
               Query(f"sum(tether_extract_output_needed_bytes{{{E}}})", "needed")]),
        Chart("Written", "Bps", "Bytes of finished samples a second.",
              [Query(f"sum(rate(tether_extract_bytes_written_total{{{E}}}[$__rate_interval]))", "written")]),
        Chart("Store time", "s", "To check a dump, write the sample's file and record it.",
              quantiles("tether_extract_store_seconds", also=E)),
    ],
)

BOARD = Board(
    uid="tether-dumps",
    title="Tether: dumps and disk",
    description="From the capture sink through the dump directory to the trainer's files.",
    instances=[
        ("server", "Server", "tether_server_build_info"),
        ("proxy", "Proxy", "tether_proxy_build_info"),
        ("extract", "Extraction", "tether_extract_build_info"),
    ],
    sections=[now, writing, directory, output],
)
