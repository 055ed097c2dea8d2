"""Error curves over n: estimators feed them, `error_curve.ErrorCurve` holds them, `fit` and `crossing` read them."""
