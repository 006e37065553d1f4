use super::*;

#[test]
fn operations_fail_after_so_many_good_ones() {
    let gpu = SimGpu::open(10).unwrap();
    let buffer = gpu.alloc(10, 4096).unwrap();
    gpu.set_faults(SimFaults { fail_after: Some(3), ..SimFaults::default() });
    let outcomes: Vec<_> = (0..5).map(|value| gpu.fill(buffer.address(), value, 10)).collect();
    let failed = |operation| Err(SimGpuError::Injected { gpu: 10, operation });
    assert_eq!(outcomes, [Ok(()), Ok(()), Ok(()), failed(3), failed(4)]);
    gpu.set_faults(SimFaults::default());
    assert_eq!(gpu.read_to_vec(buffer.address(), 10).unwrap(), [2; 10]);
}

#[test]
fn chance_is_repeated_by_its_seed() {
    let gpu = SimGpu::open(11).unwrap();
    let buffer = gpu.alloc(10, 4096).unwrap();
    let run = |seed| {
        gpu.set_faults(SimFaults { seed, failure_per_million: 250_000, ..SimFaults::default() });
        let failed = |_| u64::from(gpu.fill(buffer.address(), 1, 10).is_err());
        (0..64).map(failed).fold(0u64, |bits, bit| bits << 1 | bit)
    };
    let (first, again, other) = (run(1), run(1), run(2));
    assert_eq!(first, again);
    assert_ne!(first, other);
    assert!((4..32).contains(&first.count_ones()), "{first:b}");
}

#[test]
fn a_delay_holds_up_on_the_device_and_not_the_caller() {
    let gpu = SimGpu::open(12).unwrap();
    let buffer = gpu.alloc(10, 4096).unwrap();
    let delay = Duration::from_millis(30);
    gpu.set_faults(SimFaults { copy_delay: delay..=delay, ..SimFaults::default() });
    let start = std::time::Instant::now();
    let stream = gpu.stream();
    stream.fill(buffer.address(), 1, 10).unwrap();
    stream.fill(buffer.address(), 2, 10).unwrap();
    stream.wait(SOON).unwrap();
    assert!(start.elapsed() >= 2 * delay);
}

#[test]
fn the_text_of_faults_is_read_or_refused() {
    let read = |text: &str| text.parse::<SimFaults>();
    assert_eq!(read(""), Ok(SimFaults::default()));
    let micros = Duration::from_micros;
    let all = SimFaults {
        seed: 7,
        copy_delay: micros(5)..=micros(50),
        failure_per_million: 20,
        fail_after: Some(100),
        stall: true,
    };
    assert_eq!(read("seed=7, delay_us=5-50,failure_per_million=20,fail_after=100,stall=1"), Ok(all));
    assert_eq!(read("delay_us=9").unwrap().copy_delay, micros(9)..=micros(9));
    for wrong in ["seed", "seed=x", "delay_us=5-", "delay_us=9-5", "failure_per_million=1000001", "speed=1"] {
        assert!(matches!(read(wrong), Err(SimGpuError::FaultsText { .. })), "{wrong}");
    }
}

#[test]
fn the_environment_sets_the_faults_of_each_gpu() {
    if let Some(task) = child_task() {
        let expected = match task.as_str() {
            "right" => Ok(SimFaults { seed: 7, fail_after: Some(1), ..SimFaults::default() }),
            _ => Err("FERRYWIRE_SIM_GPU_FAULTS: \"fail_after=soon\" needs a whole number".to_string()),
        };
        for index in [0, 5] {
            let opened = SimGpu::open(index).map(|gpu| gpu.faults()).map_err(|error| error.to_string());
            assert_eq!(opened, expected);
        }
        return;
    }
    for (task, text) in [("right", "seed=7,fail_after=1"), ("wrong", "fail_after=soon")] {
        let test = "faults::the_environment_sets_the_faults_of_each_gpu";
        let output = run_child(test, task, &[(FAULTS_VARIABLE, text)]);
        assert_passed(&output);
    }
}
