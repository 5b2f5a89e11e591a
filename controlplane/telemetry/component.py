"""The telemetry domain's part of the control plane: intake of reports, the Overview. Layer: service."""

from __future__ import annotations

from controlplane.background import running
from controlplane.component import Component, Resources
from controlplane.fleet.addresses import ReplicaAddresses, replica_policy
from controlplane.fleet.live import LoadPublisher
from controlplane.ledger.consumer import StreamConsumer
from controlplane.ledger.held import HeldSettler
from controlplane.telemetry.controllers import api, take_gateway_report, take_report
from controlplane.telemetry.ingest import Ingestor
from controlplane.telemetry.labels import KnownLabels
from controlplane.telemetry.metrics import IntakeMetrics, Refusal, Unbilled
from controlplane.telemetry.scrape import DatabaseGauges, LabelLearner
from controlplane.telemetry.windows import GATEWAY


def component(resources: Resources) -> Component:
    """Routes, the background tasks of the intake, and the state they share."""
    labels = KnownLabels()
    metrics = IntakeMetrics(resources.registry, labels)
    publisher = LoadPublisher(resources.redis)
    ingestor = Ingestor(resources.engine, publisher, metrics)
    learner = LabelLearner(resources, labels)

    def stream_refused(number: int) -> None:
        ingestor.refused(GATEWAY, Refusal.USAGE, number)
        metrics.count_refused(GATEWAY, Unbilled.UNFIT, number)

    consumer = StreamConsumer(
        resources.engine,
        resources.redis,
        on_stored=metrics.count_usage,
        on_refused=stream_refused,
        on_taken=metrics.count_taken,
    )
    settler = HeldSettler(resources.engine, on_stored=metrics.count_settled)
    work = running(
        publish_loads=publisher.run,
        ingest=ingestor.run,
        consume_usage=consumer.run,
        settle_usage=settler.run,
        learn_labels=learner.run,
    )
    return Component(
        routes=[take_report, take_gateway_report, api],
        lifespans=[work],
        state={
            "ingestor": ingestor,
            "replica_addresses": ReplicaAddresses(replica_policy(resources.settings)),
            "database_gauges": DatabaseGauges(resources, metrics, publisher),
        },
    )
