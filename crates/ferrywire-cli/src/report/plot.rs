//! Plots as SVG inside of the page: figures by message size, one curve per run and series.
//!
//! Colours are classes of the page's style, so that they follow the light or dark scheme of the reader. Plotting crates
//! write colours into each element. Invariant: every coordinate is finite.

use std::fmt::Write;

use maud::{Markup, html};

use crate::units::Bytes;

/// Width and height of the drawing, and its margins, in units of the SVG.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 290.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 44.0;
/// Least distance between two labels below the plot.
const LABEL_GAP: f64 = 36.0;
/// Number of colours; further curves repeat them.
pub const COLOURS: usize = 8;

/// A curve: its name, and its points by size.
#[derive(Debug)]
pub struct Curve {
    pub name: String,
    pub points: Vec<Point>,
}

/// A figure at one size, with its range.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub size_bytes: u64,
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

/// How values become heights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Heights are proportional to values, from 0.
    Linear,
    /// Heights are proportional to the logarithms of values.
    Logarithmic,
}

/// The range of values and sizes that the axes of a plot show.
struct Axes {
    scale: Scale,
    least: f64,
    most: f64,
    first_size: f64,
    last_size: f64,
}

impl Axes {
    fn of(curves: &[Curve], scale: Scale) -> Axes {
        let points = || curves.iter().flat_map(|curve| &curve.points);
        let most = points().map(|point| point.high.max(point.value)).fold(0.0, f64::max);
        let positive = points().flat_map(|point| [point.low, point.value]).filter(|value| *value > 0.0);
        let least = positive.fold(f64::INFINITY, f64::min);
        let (least, most) = match scale {
            _ if most <= 0.0 => (0.0, 1.0),
            Scale::Linear => (0.0, step(most) * (most / step(most)).ceil()),
            Scale::Logarithmic => {
                (least.log10().floor(), most.log10().ceil().max(least.log10().floor() + 1.0))
            }
        };
        let sizes = || points().map(|point| position(point.size_bytes));
        let (first, last) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(0.0, f64::max));
        // If all points have one size, they are drawn in the middle.
        let (first_size, last_size) = if first < last { (first, last) } else { (last - 1.0, last + 1.0) };
        Axes { scale, least, most, first_size, last_size }
    }

    fn x(&self, size_bytes: u64) -> f64 {
        let share = (position(size_bytes) - self.first_size) / (self.last_size - self.first_size);
        LEFT + 10.0 + share * (WIDTH - LEFT - RIGHT - 20.0)
    }

    fn y(&self, value: f64) -> f64 {
        let value = match self.scale {
            Scale::Linear => value,
            Scale::Logarithmic => value.max(f64::MIN_POSITIVE).log10(),
        };
        let share = ((value - self.least) / (self.most - self.least)).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    /// The values of the axis that get a line and a label.
    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.most);
                let count = (self.most / step).round() as u32;
                (0..=count).map(|n| f64::from(n) * step).collect()
            }
            Scale::Logarithmic => {
                let (first, last) = (self.least as i32, self.most as i32);
                (first..=last).map(|power| 10_f64.powi(power)).collect()
            }
        }
    }
}

/// Horizontal position of a size: its logarithm to base 2.
fn position(size_bytes: u64) -> f64 {
    (size_bytes.max(1) as f64).log2()
}

/// A round distance of lines, of which at most five fit below a value.
fn step(most: f64) -> f64 {
    let rough = most / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0].into_iter().find(|round| round * power >= rough);
    round.unwrap_or(10.0) * power
}

/// A value in few characters.
fn label(value: f64) -> String {
    let (value, unit) = match value {
        1e4..1e6 => (value / 1e3, "k"),
        1e6..1e9 => (value / 1e6, "M"),
        _ => (value, ""),
    };
    if value == 0.0 || (0.001..1e6).contains(&value) {
        let digits = format!("{value:.3}");
        return format!("{}{unit}", digits.trim_end_matches('0').trim_end_matches('.'));
    }
    format!("{value:e}")
}

/// A plot with its legend; nothing where there is nothing to draw.
pub fn plot(title: &str, unit: &str, range: &str, curves: &[Curve], scale: Scale) -> Markup {
    if curves.is_empty() {
        return html! {};
    }
    let axes = Axes::of(curves, scale);
    html! {
        figure {
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(title) {
                (grid(&axes, curves))
                text x=(LEFT - 6.0) y="13" class="unit" { (unit) }
                text x=((LEFT + WIDTH - RIGHT) / 2.0) y=(HEIGHT - 6.0) class="x" { "message size in bytes" }
                @for (index, curve) in curves.iter().enumerate() {
                    (drawn(&axes, index, curve))
                }
            }
            figcaption {
                @for (index, curve) in curves.iter().enumerate() {
                    span class="entry" {
                        svg class="sign" viewBox="-8 -6 16 12" aria-hidden="true" {
                            g class=(class(index)) {
                                path class="curve" d="M-8 0H8" {}
                                (sign(index, 0.0, 0.0))
                            }
                        }
                        (curve.name)
                    }
                }
                span class="range" { (range) }
            }
        }
    }
}

fn class(index: usize) -> String {
    format!("c{}", index % COLOURS)
}

fn grid(axes: &Axes, curves: &[Curve]) -> Markup {
    let mut sizes: Vec<u64> =
        curves.iter().flat_map(|curve| &curve.points).map(|point| point.size_bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut labelled_at = f64::NEG_INFINITY;
    let labelled: Vec<u64> = sizes
        .into_iter()
        .filter(|size| {
            let fits = axes.x(*size) - labelled_at >= LABEL_GAP;
            if fits {
                labelled_at = axes.x(*size);
            }
            fits
        })
        .collect();
    html! {
        @for value in axes.ticks() {
            path class="grid" d=(format!("M{LEFT} {0:.1}H{1}", axes.y(value), WIDTH - RIGHT)) {}
            text x=(LEFT - 6.0) y=(format!("{:.1}", axes.y(value) + 4.0)) class="y" { (label(value)) }
        }
        @for size in labelled {
            path class="grid" d=(format!("M{0:.1} {1}v4", axes.x(size), HEIGHT - BOTTOM)) {}
            text x=(format!("{:.1}", axes.x(size))) y=(HEIGHT - BOTTOM + 17.0) class="x" { (Bytes(size)) }
        }
    }
}

fn drawn(axes: &Axes, index: usize, curve: &Curve) -> Markup {
    let mut path = String::new();
    let mut ranges = String::new();
    for (at, point) in curve.points.iter().enumerate() {
        let (x, y) = (axes.x(point.size_bytes), axes.y(point.value));
        let _ = write!(path, "{}{x:.1} {y:.1}", if at == 0 { 'M' } else { 'L' });
        let _ = write!(ranges, "M{x:.1} {:.1}V{:.1}", axes.y(point.low), axes.y(point.high));
    }
    html! {
        g class=(class(index)) {
            path class="ranges" d=(ranges) {}
            path class="curve" d=(path) {}
            @for point in &curve.points {
                (sign(index, axes.x(point.size_bytes), axes.y(point.value)))
            }
        }
    }
}

/// The sign of a curve: curves differ in form too, for readers who see no difference between two colours.
fn sign(index: usize, x: f64, y: f64) -> Markup {
    let form = match index % 4 {
        0 => "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
        1 => "m-3.5-3.5h7v7h-7z",
        2 => "m0-5l5 5l-5 5l-5-5z",
        _ => "m0-5l4.5 8h-9z",
    };
    html! { path class="point" d=(format!("M{x:.1} {y:.1}{form}")) {} }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_of_lines_are_round() {
        for (most, expected) in [(10.4, 5.0), (1.0, 0.2), (51.3, 20.0), (0.004, 0.001), (5.0, 1.0)] {
            assert!((step(most) - expected).abs() < expected * 1e-9, "{most}: {}", step(most));
        }
        let labels = [0.0, 0.2, 50.0, 5000.0, 1e5, 2e6, 1e12].map(label);
        assert_eq!(labels, ["0", "0.2", "50", "5000", "100k", "2M", "1e12"]);
    }

    #[test]
    fn odd_values_have_finite_places() {
        for (value, size_bytes) in [(0.0, 0), (f64::MAX, u64::MAX), (f64::MIN_POSITIVE, 1), (1.0, 4096)] {
            for scale in [Scale::Linear, Scale::Logarithmic] {
                let point = Point { size_bytes, value, low: 0.0, high: value };
                let axes = Axes::of(&[Curve { name: String::new(), points: vec![point] }], scale);
                let places = [axes.x(size_bytes), axes.y(value), axes.y(0.0)];
                let inside = |place: &f64| (0.0..=WIDTH).contains(place);
                assert!(places.iter().all(inside), "{value} {scale:?}: {places:?}");
                assert!(axes.ticks().len() < 1000, "{value} {scale:?}");
            }
        }
    }
}
