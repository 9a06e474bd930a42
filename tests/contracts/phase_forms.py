"""The form of each phase's output: what another program may rely on."""

from typing import Literal, NotRequired, TypedDict


class BackendConfiguration(TypedDict):
    """How the ranks meet."""

    initMethod: str
    backends: dict[str, str]
    timeout: str
    env: dict[str, str]


class CommunicationPlan(TypedDict):
    """Phase 5."""

    nullReasons: dict[str, str]
    backend: str
    optimizations: list[str]
    backendConfiguration: BackendConfiguration
    compression: str
    gradientBucketing: str
    gradientBucketMB: int | None
    overlap: str
    topology: str
    hierarchical: dict[str, str]
    estimatedCommunicationOverhead: str
    estimatedCommunicationOverheadShare: float | None


class GradientSynchronization(TypedDict):
    """Phase 6."""

    synchronizationMethod: Literal[
        "synchronous-allreduce",
        "asynchronous-parameter-server",
        "decentralized-sgd",
        "local-sgd",
    ]
    allReduceStrategy: str
    accumulation: dict[str, int | str]
    clipping: dict[str, float | str | None]
    mixedPrecision: dict[str, str | bool | None]
    stragglerHandling: str
    stalenessBound: int
    optimizerStateSync: str
    tradeoffs: list[str]


class CostBreakdown(TypedDict):
    """Dollars; None where no source has a price."""

    compute: float | None
    storage: float | None
    network: float | None
    other: float | None


class ProviderCost(TypedDict):
    """The run at one provider."""

    provider: str
    instance: str
    way: str
    instances: int
    usd: float
    hours: float
    usefulShare: float
    asOf: str
    source: str
    terms: dict[str, float]


class Tradeoff(TypedDict):
    """Another number of accelerators."""

    strategy: str
    hours: float
    usd: float
    chosen: bool
    basis: str


class CostEstimation(TypedDict):
    """Phase 14."""

    nullReasons: dict[str, str]
    estimatedCost: str
    estimatedCostUSD: float | None
    breakdown: CostBreakdown
    gpuHours: float | None
    rate: str
    costPerEpoch: float | None
    costPerCheckpoint: float | None
    costPerThousandSteps: float | None
    savingOpportunities: list[str]
    costVsTimeTradeoffs: list[Tradeoff]
    providerComparison: list[ProviderCost]
    budget: float | None
    withinBudget: bool | None


class Documentation(TypedDict):
    """Phase 16."""

    json: str
    markdown: str
    nextSteps: list[str]
    executiveSummary: str
    quickReference: dict[str, str]


class LaunchNetwork(TypedDict):
    """Where the ranks meet."""

    masterAddress: str
    port: int
    interface: str


class LaunchOrchestration(TypedDict):
    """Phase 13."""

    launchScript: str
    environmentConfig: dict[str, str]
    method: str
    nodeSetup: list[str]
    jobSpecification: dict[str, str]
    hostfile: list[str]
    network: LaunchNetwork
    validationScript: str
    debuggingScript: str
    instructions: list[str]


class Breakdown(TypedDict):
    """Bytes of the fullest rank by part."""

    params: int
    activations: int | None
    gradients: int
    optimizer: int
    buffers: int
    overhead: int


class Option(TypedDict):
    """A change that needs less."""

    name: str
    saves: str
    savesBytes: int
    setting: str
    costs: str


class MemoryOptimization(TypedDict):
    """Phase 7."""

    requiredMemory: str
    availableMemory: str
    memoryExceeded: bool
    requiredBytes: int
    availableBytes: int
    memoryGap: str
    memoryGapBytes: int
    breakdown: Breakdown
    activationCheckpointing: dict[str, str | int | bool]
    zero: dict[str, int | str]
    cpuOffloading: dict[str, bool | str]
    efficientAttention: str
    aggressiveOptimizations: list[Option]
    finalMemoryEstimate: str
    finalMemoryEstimateBytes: int | None


class MinimumRequirements(TypedDict):
    """The least that the job runs on."""

    minGPUs: int | None
    minMemoryPerGPU: str
    minBandwidth: str | None
    minStorage: str
    minMemoryPerGPUBytes: int
    minBandwidthBytesPerSecond: float | None
    minStorageBytes: int
    basis: str


class Bottleneck(TypedDict):
    """What is scarce."""

    resource: str
    severity: Literal["critical", "high", "medium", "low"]
    impact: str
    mitigation: str


class StorageSystem(TypedDict):
    """What the checkpoints need of the storage; what it is, the job does not say."""

    type: str
    capacity: str
    throughput: str
    iops: int | None


class ResourceAssessment(TypedDict):
    """Phase 1."""

    nullReasons: dict[str, str]
    feasible: bool
    availableGPUs: int
    availableNodes: int
    minimumRequirements: MinimumRequirements
    gpuType: str
    memoryPerGPU: str
    memoryPerGPUBytes: int
    interconnectType: str
    interconnectBandwidth: str
    interconnectBytesPerSecond: float | None
    storageSystem: StorageSystem
    computationalRequirements: dict[str, float | str | None]
    bottlenecks: list[Bottleneck]
    dataQuality: str | None
    deploymentOptions: list[str]
    estimatedCost: str | None
    estimatedCostUSD: float | None
    refusal: NotRequired[str]


class ModelSize(TypedDict):
    """What the model takes, before it is split."""

    totalParameters: int
    trainable: int
    memoryFootprint: str
    activationMemory: str | None
    optimizerMemory: str
    totalMemoryRequired: str
    totalMemoryRequiredBytes: int | None


class Layer(TypedDict):
    """A kind of layer."""

    name: str
    count: int
    parametersEach: int


class ComputationalProfile(TypedDict):
    """FLOPs of one sample."""

    forwardFLOPs: float | None
    backwardFLOPs: float | None
    totalFLOPs: float | None
    per: str


class Stage(TypedDict):
    """What a pipeline stage holds."""

    stage: int
    blocks: str
    holds: str


class ModelAnalysis(TypedDict):
    """Phase 2."""

    modelSize: ModelSize
    fitsInSingleGPU: bool
    requiresModelParallelism: bool
    requiresSharding: bool
    layerAnalysis: list[Layer]
    partitionPoints: list[int]
    computationalProfile: ComputationalProfile
    dataDependencies: list[str]
    pipelineStageSuggestions: list[Stage]
    assumed: list[str]


class Communication(TypedDict):
    """What a rank sends in one step."""

    allReduceVolume: str
    allReduceBytes: int | None
    p2pVolume: str
    frequency: str
    overlappable: bool


class Alternative(TypedDict):
    """A layout that lost."""

    strategy: str
    pros: list[str]
    cons: list[str]
    stepSeconds: float | None
    memoryBytes: int


class ParallelizationStrategy(TypedDict):
    """Phase 3."""

    nullReasons: dict[str, str]
    recommendedStrategy: Literal[
        "data-parallelism",
        "model-parallelism",
        "pipeline-parallelism",
        "tensor-parallelism",
        "hybrid-3d-parallelism",
    ]
    viable: bool
    expectedScalingEfficiency: str
    expectedScalingEfficiencyShare: float | None
    shardingStrategy: str
    dataParallelConfig: dict[str, int | str]
    tensorParallelConfig: dict[str, int | bool] | None
    pipelineParallelConfig: dict[str, int | str | float] | None
    contextParallelConfig: dict[str, int | str] | None
    expertParallelConfig: dict[str, int] | None
    hybridConfig: dict[str, int | str]
    communicationPattern: Communication
    frameworkRecommendation: str
    alternatives: list[Alternative]
    challenges: list[str]
    mitigations: list[str]


class ShardingConfig(TypedDict):
    """Who reads what."""

    method: str
    shardsPerWorker: int
    shuffling: str
    samplerType: str


class DataDistribution(TypedDict):
    """Phase 4."""

    nullReasons: dict[str, str]
    appliesTo: str
    loadingStrategy: str
    shardingConfig: ShardingConfig
    workerCount: int
    prefetch: dict[str, int | str | bool]
    caching: str
    storage: str
    augmentation: dict[str, str]
    imbalanceHandling: str
    estimatedThroughput: str | None
    estimatedSamplesPerSecond: float | None


class StorageLocation(TypedDict):
    """Where checkpoints are."""

    primary: str
    backup: str
    type: str


class FaultTolerance(TypedDict):
    """Phase 8."""

    nullReasons: dict[str, str]
    appliesTo: str
    strategy: str
    checkpointFrequency: str
    checkpointFrequencySteps: int
    advisedFrequencySteps: int | None
    storageLocation: StorageLocation
    components: list[str]
    format: str
    rotation: dict[str, int | str | None]
    recoveryPlan: dict[str, bool | int | str]
    elastic: dict[str, int | str]
    failureDetection: dict[str, str]
    gracefulDegradation: list[str]
    estimatedRecoveryTime: str
    estimatedRecoverySeconds: float
    expectedFailuresPerDay: float | None
    expectedUsefulShare: float | None
    reason: str | None


class AlertingRule(TypedDict):
    """A threshold."""

    condition: str
    threshold: str
    severity: Literal["critical", "warning", "info"]
    action: str


class MonitoringPlan(TypedDict):
    """Phase 9."""

    nullReasons: dict[str, str]
    appliesTo: str
    metrics: list[str] | None
    alertingRules: list[AlertingRule] | None
    gpuMetrics: list[str]
    cpuMetrics: list[str]
    memoryMetrics: list[str]
    networkMetrics: list[str]
    diskMetrics: list[str]
    healthChecks: list[dict[str, str]]
    profiling: dict[str, str]
    logging: dict[str, str]
    dashboards: list[str]
    baselines: dict[str, float | None]
    bottleneckDetection: list[dict[str, str]]


class ConfigFiles(TypedDict):
    """Which file says what."""

    main: str
    distributed: str
    data: str


class TrainingConfiguration(TypedDict):
    """Phase 10."""

    framework: str
    estimatedDuration: str
    estimatedDurationSeconds: float | None
    configFiles: ConfigFiles
    init: str
    wrapping: str
    loader: str
    optimizer: dict[str, str | float | list[float]]
    scheduler: dict[str, str | int | float]
    loop: str
    precision: str
    throughput: str | None


class Guideline(TypedDict):
    """Another size of the cluster."""

    numGPUs: int
    batch: int
    lr: float
    rule: str


class Hyperparameters(TypedDict):
    """Phase 11."""

    globalBatchSize: int
    microBatchSize: int
    learningRate: float
    optimizer: str
    gradientAccumulationSteps: int
    dataParallelSize: int
    learningRateScaling: dict[str, str | float]
    warmup: dict[str, int | str]
    betas: list[float] | None
    weightDecay: float
    clipping: float | None
    scalingGuidelines: list[Guideline]
    search: dict[str, str | list[float]]


class AppliedOptimization(TypedDict):
    """One thing that makes it faster, and whether the plan does it."""

    name: str
    applied: bool
    why: str


class PerformanceOptimization(TypedDict):
    """Phase 12."""

    appliedOptimizations: list[AppliedOptimization]
    expectedSpeedup: str
    expectedSpeedupFactor: float | None
    kernelFusion: str
    precision: str
    compiler: str
    flashAttention: str
    cudnn: dict[str, bool]
    checklist: list[str]


class Check(TypedDict):
    """Something to do, and what must come out."""

    name: str
    how: str
    passes: str


class Correctness(TypedDict):
    """How gradients are compared."""

    method: str
    baseline: str
    tolerance: str


class ValidationPlan(TypedDict):
    """Phase 15."""

    preTrainingValidations: list[Check]
    runtimeValidations: list[Check]
    smokeTests: list[Check]
    reproducibilityTests: list[Check]
    scalingTests: dict[str, list[Check]]
    faultInjectionTests: list[Check]
    baselines: dict[str, float | None]
    gradientCorrectness: Correctness
    troubleshootingGuide: list[Check]


FORMS: dict[int, type] = dict(
    enumerate(
        (
            ResourceAssessment,
            ModelAnalysis,
            ParallelizationStrategy,
            DataDistribution,
            CommunicationPlan,
            GradientSynchronization,
            MemoryOptimization,
            FaultTolerance,
            MonitoringPlan,
            TrainingConfiguration,
            Hyperparameters,
            PerformanceOptimization,
            LaunchOrchestration,
            CostEstimation,
            ValidationPlan,
            Documentation,
        ),
        start=1,
    )
)
"""Number of a phase -> the form of its output."""
