"""Error curves and their rates: `study.study` measures, `curve.Curve` holds, `fit.fit_rate` fits."""
