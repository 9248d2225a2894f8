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

{{- define "convgrad.probe" -}}
{{- if .root.Values.tls.clientCa -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ ternary "HTTPS" "HTTP" (ne .root.Values.tls.secret "") }}}
{{- end -}}
{{- end -}}

{{- define "convgrad.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "convgrad.name" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}
