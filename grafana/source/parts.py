"""What all dashboards share: variables, links, and panels that always have a unit and a description."""

from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "tether"
RUNBOOK = "The runbook of the alerts is docs/runbook.md, the list of all series docs/metrics.md."

# Widths in Grafana's 24 columns, heights in its rows.
SMALL, THIRD, HALF, FULL = 4, 8, 12, 24
LOW, HIGH = 4, 8

GREEN, YELLOW, RED, NEUTRAL = "green", "yellow", "red", "text"


@dataclass(frozen=True)
class Query:
    """One expression and how its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Chart:
    """A panel: numbers over time, or one number now if `now` is set."""

    title: str
    unit: str
    description: str
    queries: list[Query]
    now: bool = False
    # Values from which a colour holds, lowest first; None is everything below the first.
    thresholds: list[tuple[float | None, str]] = field(default_factory=lambda: [(None, NEUTRAL)])
    stacked: bool = False
    width: int | None = None
    # Shows the name of the series instead of its value.
    names: bool = False
    decimals: int | None = None
    minimum: float | None = 0
    maximum: float | None = None


@dataclass(frozen=True)
class Section:
    """A row of panels under a heading."""

    title: str
    charts: list[Chart]


@dataclass(frozen=True)
class Board:
    """One dashboard. `instances` are variables: name, label, the metric whose `instance` labels they list."""

    uid: str
    title: str
    description: str
    instances: list[tuple[str, str, str]]
    sections: list[Section]
    span: str = "now-3h"

    def build(self) -> model.Dashboard:
        board = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(f"{self.description} {RUNBOOK}")
            .tags([TAG])
            .timezone("browser")
            .refresh("10s")
            .time(self.span, "now")
            .tooltip(model.DashboardCursorSync.CROSSHAIR)
            .editable()
            .with_variable(datasource())
        )
        for name, label, metric in self.instances:
            board.with_variable(instance(name, label, metric))
        board.link(
            dashboard.DashboardLink("Tether")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(False)
            .keep_time(True)
            .include_vars(True)
        )
        number = 0
        top = 0
        for section in self.sections:
            number += 1
            board.with_row(dashboard.Row(section.title).id(number).grid_pos(place(top, 0, FULL, 1)))
            top += 1
            left, row_height = 0, 0
            for chart in section.charts:
                number += 1
                width = chart.width or (SMALL if chart.now else THIRD)
                height = LOW if chart.now else HIGH
                if left + width > FULL:
                    top, left, row_height = top + row_height, 0, 0
                board.with_panel(panel(chart).id(number).grid_pos(place(top, left, width, height)))
                left, row_height = left + width, max(row_height, height)
            top += row_height
        return board.build()


def place(top: int, left: int, width: int, height: int) -> model.GridPos:
    return model.GridPos(x=left, y=top, w=width, h=height)


def datasource() -> Builder[model.VariableModel]:
    """The one place that says where the data is: never a source by name."""
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def instance(name: str, label: str, metric: str) -> Builder[model.VariableModel]:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({metric}, instance)")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text=["All"], value=["$__all"]))
    )


def panel(chart: Chart):
    thresholds = dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(
        [model.Threshold(value=value, color=color) for value, color in chart.thresholds]
    )
    made = number(chart) if chart.now else graph(chart)
    made.title(chart.title).description(chart.description).unit(chart.unit).datasource(DATASOURCE)
    made.thresholds(thresholds)
    if chart.minimum is not None:
        made.min(chart.minimum)
    if chart.maximum is not None:
        made.max(chart.maximum)
    if chart.decimals is not None:
        made.decimals(chart.decimals)
    for index, query in enumerate(chart.queries):
        target = (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + index))
            .expr(query.expr)
            .legend_format(query.legend)
            .format(PromQueryFormat.TIME_SERIES)
            .datasource(DATASOURCE)
        )
        made.with_target(target.instant() if chart.now else target.range())
    return made


def number(chart: Chart) -> stat.Panel:
    text = common_model.BigValueTextMode.NAME if chart.names else common_model.BigValueTextMode.AUTO
    return (
        stat.Panel()
        .color_mode(common_model.BigValueColorMode.BACKGROUND)
        .graph_mode(common_model.BigValueGraphMode.NONE)
        .text_mode(text)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .no_value("–")
    )


def graph(chart: Chart) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .draw_style(common_model.GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(30 if chart.stacked else 10)
        .show_points(common_model.VisibilityMode.NEVER)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_model.TooltipDisplayMode.MULTI)
            .sort(common_model.SortOrder.DESCENDING)
        )
    )
    if chart.stacked:
        made.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if len(chart.thresholds) > 1:
        made.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        )
    return made


def quantiles(metric: str, by: str = "", also: str = "") -> list[Query]:
    """Median, 95th and 99th percentile of a histogram; `by` are further labels to keep, `also` further matchers."""
    keep = ", ".join(label for label in ("le", by) if label)
    legend = f"{{{{{by}}}}} " if by else ""
    return [
        Query(
            f"histogram_quantile({q}, sum by ({keep}) (rate({metric}_bucket{{{also}}}[$__rate_interval])))",
            f"{legend}p{int(q * 100)}",
        )
        for q in (0.5, 0.95, 0.99)
    ]


def rates(metric: str, by: str, matchers: str) -> Query:
    """Events a second by one label."""
    return Query(f"sum by ({by}) (rate({metric}{{{matchers}}}[$__rate_interval]))", f"{{{{{by}}}}}")


def must_be_zero() -> list[tuple[float | None, str]]:
    return [(None, GREEN), (1e-9, RED)]


def process(prefix: str, matchers: str) -> Section:
    """The process and its runtime, alike for each binary."""
    return Section(
        "Process",
        [
            Chart("CPU", "percentunit", "Cores that the process uses.",
                  [Query(f"rate(process_cpu_seconds_total{{{matchers}}}[$__rate_interval])", "{{instance}}")]),
            Chart("Memory", "bytes", "Resident memory.",
                  [Query(f"process_resident_memory_bytes{{{matchers}}}", "{{instance}}")]),
            Chart("Threads and open files", "short", "Threads, and file descriptors beside their limit.",
                  [Query(f"process_threads{{{matchers}}}", "threads"),
                   Query(f"process_open_fds{{{matchers}}}", "open files"),
                   Query(f"process_max_fds{{{matchers}}}", "most open files")]),
            Chart("Async tasks", "short", "Tasks alive, and tasks in the runtime's global queue. A queue that stays "
                  "long means that the runtime's threads are blocked or too few.",
                  [Query(f"{prefix}_tokio_tasks{{{matchers}}}", "alive"),
                   Query(f"{prefix}_tokio_queued_tasks{{{matchers}}}", "queued")]),
            Chart("Runtime busy", "percentunit", "Share of the runtime's threads that is busy.",
                  [Query(f"rate({prefix}_tokio_busy_seconds_total{{{matchers}}}[$__rate_interval])"
                         f" / {prefix}_tokio_workers{{{matchers}}}", "{{instance}}")], maximum=1),
            Chart("Up since", "s", "Seconds since the process started, and which build it is.",
                  [Query(f"time() - process_start_time_seconds{{{matchers}}}", "{{instance}}"),
                   Query(f"{prefix}_build_info{{{matchers}}}", "build {{version}}")]),
        ],
    )
