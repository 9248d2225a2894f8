{{- define "convgrad.name" -}}
{{- printf "%s" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "convgrad.selector" -}}
app.kubernetes.io/name: convgrad
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "convgrad.labels" -}}
{{ include "convgrad.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "convgrad.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
{{- end -}}

{{- /* How long a terminating pod keeps accepting requests: until its readiness probe has failed and every
gRPC connection has reached its age, which varies by 10 %. */ -}}
{{- define "convgrad.drainSeconds" -}}
{{ add .Values.probes.readinessSeconds 3 (div (add (mul 11 .Values.grpcConnectionSeconds) 9) 10) }}
{{- end -}}

{{- /* appProtocol of the HTTP and gRPC ports, for meshes and gateways. */ -}}
{{- define "convgrad.httpProtocol" -}}
{{ ternary "http" "https" (eq .Values.tls.secret "") }}
{{- end -}}
{{- define "convgrad.grpcProtocol" -}}
{{ ternary "kubernetes.io/h2c" "https" (eq .Values.tls.secret "") }}
{{- end -}}

{{- /* A setting as text. Helm reads numbers as floats, of which it prints large ones as 4.2e+09. */ -}}
{{- define "convgrad.setting" -}}
{{- if kindIs "float64" . -}}
{{ printf (ternary "%.0f" "%g" (eq . (floor .))) . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{- define "convgrad.tracingPort" -}}
{{- $origin := regexFind "^https?://[^/]+" .Values.tracing.endpoint -}}
{{ regexFind ":[0-9]+$" $origin | trimPrefix ":" | default (ternary "443" "80" (hasPrefix "https:" $origin)) }}
{{- end -}}

{{- define "convgrad.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "convgrad.name" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}
